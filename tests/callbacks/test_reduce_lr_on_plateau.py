# SPDX-License-Identifier: Apache-2.0
"""`ReduceLROnPlateau`, driven by scripted figures; the rates are Keras's."""

from __future__ import annotations

import pytest
import torch

from ipufit import ConfigError, IPUModel
from ipufit.callbacks import ReduceLROnPlateau
from tests.callbacks.driving import ScriptedModel, play


@pytest.mark.parametrize(
    ("arguments", "rates"),
    [
        ({"patience": 2}, [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ({"patience": 1, "cooldown": 2}, [1, 0.5, 0.5, 0.25, 0.25, 0.125]),
        ({"patience": 0}, [1, 0.5, 0.25]),
        ({"patience": 0, "min_lr": 0.3}, [1, 0.5, 0.3, 0.3]),
        ({"patience": 0, "min_lr": 2.0}, [1, 1]),
    ],
)
def test_the_rate_falls_while_the_figure_is_flat(arguments, rates):
    reducing = ReduceLROnPlateau("q", factor=0.5, mode="min", **arguments)
    played = play(reducing, [3.0] * len(rates))
    assert played.rates == rates
    # The logs have the rate that the epoch was trained with.
    assert [logs["learning_rate"] for logs in played.logs] == [1, *rates[:-1]]


def test_a_rate_that_is_the_lowest_but_for_rounding_stays(capsys):
    reducing = ReduceLROnPlateau("q", mode="min", patience=0, min_lr=0.01, verbose=1)
    play(reducing, [3.0] * 5, model=ScriptedModel(rates=(1.0,)))
    assert capsys.readouterr().out.count("reducing") == 2  # 0.1, 0.010000000000000002


def test_it_says_what_it_did(capsys):
    reducing = ReduceLROnPlateau("q", factor=0.5, mode="min", patience=2, verbose=1)
    play(reducing, [3.0] * 3)
    assert capsys.readouterr().out == (
        "\nEpoch 3: ReduceLROnPlateau reducing learning rate to 0.5.\n"
    )


def test_all_groups_fall_by_the_same_ratio():
    model = ScriptedModel(rates=(1.0, 0.1, 4.0))
    reducing = ReduceLROnPlateau("q", factor=0.5, mode="min", patience=0, min_lr=0.4)
    play(reducing, [3.0] * 3, model=model)
    assert model.rates == pytest.approx([0.4, 0.04, 1.6])


def test_a_figure_that_is_missing_warns_but_the_rate_is_reported():
    reducing = ReduceLROnPlateau("q", mode="min", patience=0)
    with pytest.warns(UserWarning, match="Available metrics are: loss,learning_rate.$"):
        played = play(reducing, [{"loss": 1.0}])
    assert played.logs == [{"loss": 1.0, "learning_rate": 1.0}]


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_factor_that_reduces_nothing_is_refused(factor):
    with pytest.raises(ConfigError, match=r"does not support a factor >= 1\.0"):
        ReduceLROnPlateau(factor=factor)


def test_a_model_with_a_schedule_is_refused():
    model = ScriptedModel(has_lr_schedule=True)
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau.*schedule"):
        play(ReduceLROnPlateau("q", mode="min"), [1.0], model=model)


def test_a_fit_goes_on_with_the_lower_rate():
    def final_weights(callbacks, rates):
        torch.manual_seed(0)
        module = torch.nn.Linear(2, 1)
        model = IPUModel(module)
        model.compile(torch.optim.SGD(module.parameters(), lr=rates[0]), "mse")
        for epoch, rate in enumerate(rates):
            model.optimizer.param_groups[0]["lr"] = rate
            history = model.fit(
                *data,
                batch_size=4,
                initial_epoch=epoch if len(rates) > 1 else 0,
                epochs=epoch + 1 if len(rates) > 1 else 3,
                callbacks=callbacks,
                shuffle=False,
                verbose=0,
            )
        return history, model.get_weights()

    data = torch.randn(8, 2), torch.randn(8, 1)
    reducing = ReduceLROnPlateau("loss", 0.5, patience=0, mode="max", min_delta=9.0)
    history, reduced = final_weights([reducing], [0.1])
    _, by_hand = final_weights([], [0.1, 0.1, 0.05])
    assert history.history["learning_rate"] == [0.1, 0.1, 0.05]
    for mine, expected in zip(reduced, by_hand):
        assert mine == pytest.approx(expected)
