# SPDX-License-Identifier: Apache-2.0
"""Outputs without targets, nested ones, single numbers: taken, or refused in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ipufit import ConfigError, DataError, IPUConfig, IPUModel

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
NARROW, WIDE = X[:, :1].abs() / 9, X[:, 1:].softmax(1)


class Ending(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.layer, self.end = nn.Linear(4, 4), end

    def forward(self, x):
        hidden = self.layer(x)
        return self.end(hidden[:, :1], hidden[:, 1:])


def history(end, loss, targets, **compiled):
    torch.manual_seed(0)
    model = IPUModel(Ending(end), IPUConfig(micro_batch_size=4))
    model.compile("sgd", loss, **compiled)
    found = model.fit(X, targets, batch_size=8, shuffle=False, verbose=0).history
    evaluated = model.evaluate(X, targets, batch_size=8, verbose=0)
    assert set(evaluated) == set(found)
    return found, evaluated


@pytest.fixture(scope="module")
def alone():
    """The history of a model of the second output alone."""
    return history(lambda a, b: b, "mse", WIDE)


def pair(a, b):
    return a, b


def named(a, b):
    return {"a": a, "b": b}


@pytest.mark.parametrize("end", [pair, named])
@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        ("mse", [None, WIDE]),
        ("mse", (None, WIDE)),
        ([None, "mse"], [None, WIDE]),
        ([None, "mse"], [NARROW, WIDE]),
        ([None, nn.MSELoss()], WIDE),
    ],
)
def test_an_output_without_a_target_has_no_loss(end, loss, targets, alone):
    assert history(end, loss, targets) == alone
    assert list(alone[0]) == ["loss"]


def test_so_it_is_by_name(alone):
    for loss in ("mse", {"b": "mse"}, {"a": None, "b": "mse"}):
        for targets in ({"b": WIDE}, {"a": None, "b": WIDE}):
            assert history(named, loss, targets) == alone


def test_a_loss_of_an_output_without_a_target_says_so():
    with pytest.raises(DataError, match=r"'mse' is for the module's output 'a', whose"):
        history(named, {"a": "mse", "b": "mse"}, [None, WIDE])
    with pytest.raises(DataError, match=r"'mae' is for the module's output 'output_2'"):
        history(pair, ["mse", "mae"], [NARROW, None])


def squares(outputs, targets):
    if isinstance(outputs, dict):
        outputs, targets = outputs.values(), targets.values()
    errors = [(o - t).square().mean(1) for o, t in zip(outputs, targets)]
    return torch.stack(errors).mean(0)


NESTS = [
    (
        lambda a, b: {"n": (a, b), "m": b},
        {"n": "mse", "m": "mae"},
        "output 'n' is a tu",
    ),
    (lambda a, b: (named(a, b), b), ["mse", "mae"], "output 'output_1' is a dict"),
    (lambda a, b: [[a, b], b], ["mse", "mae"], "output 'output_1' is a list"),
]


@pytest.mark.parametrize(("end", "loss", "words"), NESTS)
def test_nested_outputs_take_a_function(end, loss, words):
    nested = end(NARROW, WIDE)
    with pytest.raises(
        DataError, match=rf"'mse' takes one tensor, .* {words}.*function"
    ):
        history(end, loss, nested)
    loss = {**loss, "n": squares} if isinstance(loss, dict) else [squares, loss[1]]
    found, _ = history(end, loss, nested)

    def flat(a, b):
        return {"x": a, "y": b, "z": b}

    expected, _ = history(
        *(flat, {"x": "mse", "y": "mse", "z": "mae"}),
        {"x": NARROW, "y": WIDE, "z": WIDE},
        loss_weights={"x": 0.5, "y": 0.5, "z": 1.0},
    )
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("inner", [["mse", "mae"], {"x": "mse"}, ("mse", None)])
def test_nested_losses_are_refused_in_words(inner):
    for loss in ([inner, "mse"], {"a": inner, "b": "mse"}):
        with pytest.raises(ConfigError, match=r"takes one loss. Return the tensors"):
            IPUModel(Ending(named)).compile("sgd", loss)


@pytest.mark.parametrize("inner", [(NARROW, WIDE), {"low": NARROW, "high": WIDE}])
def test_a_nested_target_of_one_output_is_refused_in_words(inner):
    with pytest.raises(DataError, match=r"takes one target for .*output 'a', and"):
        history(named, "mse", {"a": inner, "b": WIDE})
    with pytest.raises(
        DataError, match=r"takes one target for the module's output, and"
    ):
        history(lambda a, b: a, "mse", inner)


NAMES = [
    *("bce", "categorical_crossentropy", "cosine_similarity", "cross_entropy"),
    *("hinge", "huber", "kl_div", "l1", "log_cosh", "mape", "mse", "msle", "nll"),
    *("poisson", "sparse_categorical_crossentropy", "squared_hinge"),
]
MODULES = [
    *(nn.KLDivLoss(reduction=kind) for kind in ("batchmean", "none")),
    *(nn.BCEWithLogitsLoss(), nn.CrossEntropyLoss(), nn.MultiMarginLoss()),
    *(nn.MSELoss(), nn.PoissonNLLLoss(), nn.SoftMarginLoss()),
]


@pytest.mark.parametrize("loss", NAMES + MODULES, ids=str)
def test_a_single_number_is_no_output_of_samples(loss):
    with pytest.raises(DataError, match=r"output is a single number"):
        history(lambda a, b: a.mean(), loss, NARROW)
    with pytest.raises(DataError, match=r"module's output 'b' is a single number"):
        history(lambda a, b: named(a, b.mean()), {"a": "mse", "b": loss}, [NARROW] * 2)


def test_a_single_number_that_is_the_loss_takes_the_function_of_the_message():
    torch.manual_seed(0)
    model = IPUModel(Ending(lambda a, b: named(a, b.square().mean())))
    model.compile("sgd", {"a": "mse", "b": lambda outputs, targets: outputs})
    found = model.fit(X, [NARROW, NARROW], batch_size=8, verbose=0).history
    assert set(found) == {"loss", "a_loss", "b_loss"}


@pytest.mark.parametrize("loss", ["mse", squares, ["mse"]])
def test_a_forward_without_return_is_told(loss):
    with pytest.raises(DataError, match=r"returned None.* no `return` in its forward"):
        history(lambda a, b: None, loss, WIDE)
