# SPDX-License-Identifier: Apache-2.0
"""Several named outputs: losses, metrics, weights and their names."""

import pytest

from ipufit import IPUModel
from tests.keras.test_weights import weights
from tests.keras.twins import compiled, data, fit_both, two_heads


def samples(rows, seed=0):
    x, left = data(rows, seed=seed)
    return x, {"left": left, "right": data(rows, num_targets=2, seed=seed + 9)[1]}


BOTH = {"left": "mse", "right": "mae"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss": "mse"},
        {"loss": {"left": "mse"}},
        {"loss": BOTH, "loss_weights": {"left": 0.5, "right": 2.0}},
        {"loss": BOTH, "metrics": {"left": ["mae"], "right": ["mse", "mae"]}},
        {"loss": BOTH, "metrics": {"right": "mse"}},
        {"loss": ["mse", "mae"], "metrics": [["mae"], ["mse", "mae"]]},
        {"loss": ["mse", "mae"], "loss_weights": [0.5, 2.0], "metrics": ["mae", "mse"]},
        {"loss": ["mse", None], "loss_weights": [0.5, 2.0]},
        {"loss": ["mse", "mae"], "loss_weights": [None, 2.0]},
    ],
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # of an output without
def test_figures_of_named_outputs_are_keras_s(arguments):
    pair = compiled(two_heads(), **arguments)
    fit_both(pair, *samples(24), epochs=2, validation_data=samples(8, seed=1))


@pytest.mark.parametrize("weights_of_losses", [[0.5], [0.5, 2.0, 1.0]])
def test_a_list_has_a_weight_for_each_loss(weights_of_losses):
    arguments = {"loss": ["mse", "mae"], "loss_weights": weights_of_losses}
    model, module = two_heads()
    model.compile("sgd", **arguments)
    with pytest.raises(ValueError, match="must match the number of losses"):
        model.fit(*samples(8), verbose=0)
    with pytest.raises(ValueError, match="give a weight for each loss"):
        IPUModel(module).compile("sgd", **arguments)


def test_so_are_those_with_sample_weights():
    pair = compiled(
        two_heads(),
        loss=BOTH,
        metrics={"left": ["mae"], "right": ["mae"]},
        weighted_metrics={"left": ["mae"], "right": ["mse"]},
    )
    history = fit_both(pair, *samples(24), epochs=2, sample_weight=weights(24))
    assert "left_weighted_mae" in history.history
    assert "right_mse" in history.history


@pytest.mark.parametrize("loss", ["mse", BOTH])
def test_evaluate_lists_losses_in_keras_s_order(loss):
    model, ipu = compiled(two_heads(), loss=loss)
    x, y = samples(8)
    expected = model.evaluate(x, y, verbose=0)
    assert len(expected) == 3
    assert ipu.evaluate(x, y, verbose=0, return_dict=False) == pytest.approx(expected)
