# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics of several outputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

from ipufit import (
    ConfigError,
    DataError,
    IPUConfig,
    IPUModel,
    StreamedMetric,
    UnknownNameError,
    UnsupportedError,
    log,
)
from tests import reference

COUNT = 24
X, CLASSES = reference.samples(COUNT)
NUMBERS = torch.randn(COUNT, 1, generator=torch.Generator().manual_seed(1))
NAMED = {"b": CLASSES, "a": NUMBERS}
LISTED = [CLASSES, NUMBERS]


class Two(nn.Module):
    """Classes and a number, in a dict or in a tuple; the dict isn't in the alphabet."""

    def __init__(self, *, is_dict=True):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.body = nn.Linear(3, 5)
            self.classes = nn.Linear(5, 4)
            self.number = nn.Linear(5, 1)
        self._is_dict = is_dict

    def forward(self, x):
        hidden = self.body(x).tanh()
        classes, number = self.classes(hidden), self.number(hidden)
        return {"b": classes, "a": number} if self._is_dict else (classes, number)


def figures_of(outputs, weights=None):
    """Each loss on its own, from plain torch; weights by output."""
    each = {
        "b": F.cross_entropy(outputs["b"], CLASSES, reduction="none"),
        "a": (outputs["a"] - NUMBERS).square()[:, 0],
    }
    if weights is not None:
        each = {name: value * weights[name] for name, value in each.items()}
    return {name: value.mean() for name, value in each.items()}


BOTH = {"b": "cross_entropy", "a": "mse"}
CASES = {
    "by name": ((BOTH,), {"b": 1, "a": 1}),
    "by name, in another order": (
        ({"a": "mse", "b": "cross_entropy"},),
        {"b": 1, "a": 1},
    ),
    "in a list": ((["cross_entropy", nn.MSELoss()],), {"b": 1, "a": 1}),
    "none for one": ((["cross_entropy", None],), {"b": 1}),
    "none for one by name": (({"a": "mse", "b": None},), {"a": 1}),
    "only one named": (({"a": "mse"},), {"a": 1}),
    "weights by name": ((BOTH, {"a": 0.25, "b": 2}), {"b": 2, "a": 0.25}),
    "some weights": ((BOTH, {"a": 0.25}), {"b": 1, "a": 0.25}),
    "weights in a list": ((["cross_entropy", "mse"], [2.0, 0.25]), {"b": 2, "a": 0.25}),
    "a weight of nothing": ((BOTH, {"a": 0}), {"b": 1, "a": 0}),
}


IN_TUPLES = ["by name", "in a list", "only one named", "some weights"]


@pytest.mark.parametrize(
    ("name", "is_dict"),
    [*((name, True) for name in CASES), *((name, False) for name in IN_TUPLES)],
)
def test_the_total_is_the_weighted_sum_and_so_are_gradients(name, is_dict):
    arguments, weights = CASES[name]
    by_name = isinstance(arguments[0], dict)
    if by_name and not is_dict:
        rename = {"b": "output_1", "a": "output_2"}
        arguments = tuple({rename[k]: v for k, v in a.items()} for a in arguments)
    module = Two(is_dict=is_dict)
    twin = Two()
    model = IPUModel(module, IPUConfig(replicas=2))
    model.compile(torch.optim.SGD(module.parameters(), lr=0.3), *arguments)
    history = model.fit(
        X,
        NAMED if is_dict else LISTED,
        batch_size=COUNT,
        epochs=2,
        shuffle=False,
        verbose=0,
    ).history
    names = {"b": "b", "a": "a"} if is_dict else {"b": "output_1", "a": "output_2"}
    several = {f"{names[n]}_loss" for n in weights} if len(weights) > 1 else set()
    assert set(history) == {"loss"} | several
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.3)
    for epoch in range(2):
        losses = figures_of(twin(X))
        total = sum(weights[n] * losses[n] for n in weights)
        assert history["loss"][epoch] == pytest.approx(total.item(), rel=1e-5)
        if several:
            for n in weights:  # without their weights, as in Keras
                loss = history[f"{names[n]}_loss"][epoch]
                assert loss == pytest.approx(losses[n].item(), rel=1e-5)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    reference.assert_same_weights(module, twin)


class Median(StreamedMetric):
    def __init__(self):
        super().__init__("median")

    def reset(self):
        self.seen = []

    def update(self, outputs, targets, weights=None):
        self.seen.append(outputs)

    def result(self):
        return float(torch.cat(self.seen).median())


def test_metrics_have_the_names_of_their_outputs_and_the_order_of_compile():
    model = IPUModel(Two())
    model.compile(
        "sgd",
        BOTH,
        metrics={"a": [Median(), "mae", "mae"], "b": "accuracy"},
        weighted_metrics={"a": ["mae", "mse"]},
    )
    named = model.evaluate(X, NAMED, verbose=0)
    assert list(named) == sorted(named)
    order = ["loss", "b_loss", "a_loss"]
    order += ["a_median", "a_mae", "a_mae_1", "b_accuracy"]
    order += ["a_weighted_mae", "a_mse"]
    assert sorted(order) == list(named)
    listed = model.evaluate(X, NAMED, verbose=0, return_dict=False)
    assert listed == [named[name] for name in order]
    with torch.no_grad():
        outputs = model.module(X)
    expected = {
        "a_median": float(outputs["a"].median()),
        "a_mae": float((outputs["a"] - NUMBERS).abs().mean()),
        "b_accuracy": float(outputs["b"].argmax(dim=1).eq(CLASSES).float().mean()),
    }
    assert {n: named[n] for n in expected} == pytest.approx(expected, rel=1e-5)
    history = model.fit(X, NAMED, batch_size=12, verbose=0).history
    assert list(history) == sorted(order)


@pytest.mark.parametrize("padded", [False, True])
def test_samples_may_weigh_differently_in_each_output(padded):
    weights = {"a": torch.linspace(0, 2, COUNT), "b": torch.linspace(3, 0, COUNT)}
    module, twin = Two(), Two()
    model = IPUModel(module, IPUConfig(replicas=2))
    model.compile(
        torch.optim.SGD(module.parameters(), lr=0.3),
        BOTH,
        metrics={"a": ["mae"]},
        weighted_metrics={"a": ["mae"]},
    )
    size = 28 if padded else 24
    history = model.fit(
        X,
        NAMED,
        batch_size=size,
        sample_weight=weights,
        shuffle=False,
        verbose=0,
        drop_last="pad",
    ).history
    outputs = twin(X)
    losses = figures_of(outputs, weights)
    sum(losses.values()).backward()
    torch.optim.SGD(twin.parameters(), lr=0.3).step()
    reference.assert_same_weights(module, twin)
    errors = (outputs["a"] - NUMBERS).abs()[:, 0].detach()
    expected = {
        "loss": sum(losses.values()).item(),
        "a_loss": losses["a"].item(),
        "b_loss": losses["b"].item(),
        "a_mae": errors.mean().item(),
        "a_weighted_mae": float((errors * weights["a"]).sum() / weights["a"].sum()),
    }
    assert {n: v[0] for n, v in history.items()} == pytest.approx(expected, rel=1e-5)


# Errors -------------------------------------------------------------------------------

BAD_SETTINGS = {
    "a loss of an unknown output": ({"loss": {"c": "mse"}}, "output 'c'.*returns b, a"),
    "fewer losses": ({"loss": ["cross_entropy"]}, "returns 2"),
    "a metric of an unknown output": (
        {"loss": BOTH, "metrics": {"c": ["mae"]}},
        "output 'c'",
    ),
    "one metric for two outputs": ({"loss": BOTH, "metrics": ["mae"]}, "2 outputs"),
    "a weight of an unknown output": (
        {"loss": "mse", "loss_weights": {"b": 1.0, "c": 0.1}},
        "returns b, a",
    ),
    "more weights": (
        {"loss": "mse", "loss_weights": [1.0, 0.1, 7.0]},
        "returns b, a",
    ),
}
ONE_EACH = {"loss": {"a": "mse"}, "metrics": {"b": ["mae"]}}
BAD_TARGETS = {
    "targets without one": (BOTH, {"b": CLASSES}, "no 'a'"),
    "one target for two": (BOTH, CLASSES, "one tensor"),
    "too few targets": (BOTH, [CLASSES], "1 targets|one"),
    "targets of other shapes": (
        BOTH,
        {"b": X, "a": NUMBERS},
        "'cross_entropy' of output 'b' can't take outputs of float32",
    ),
}
BAD = [
    *((settings, NAMED, ConfigError, m) for settings, m in BAD_SETTINGS.values()),
    *(({"loss": loss}, y, DataError, m) for loss, y, m in BAD_TARGETS.values()),
    # One target for an output with a loss, and one without.
    (ONE_EACH, NUMBERS, DataError, "2 outputs"),
]


@pytest.mark.parametrize(
    ("settings", "targets", "error", "message"),
    BAD,
    ids=[*BAD_SETTINGS, *BAD_TARGETS, "one target"],
)
def test_what_does_not_fit_the_outputs_is_said(settings, targets, error, message):
    model = IPUModel(Two())
    model.compile("sgd", **settings)
    for run in (model.fit, model.evaluate):
        with pytest.raises(error, match=message):
            run(X, targets, batch_size=12, verbose=0)


def test_weights_per_output_do_not_fit_a_loss_of_all():
    def both(outputs, targets):
        return F.mse_loss(outputs["a"], targets["a"], reduction="none")

    model = reference.compiled(Two(), loss=both)
    weights = {"a": torch.ones(COUNT), "b": torch.ones(COUNT)}
    with pytest.raises(UnsupportedError, match="per output"):
        model.fit(X, NAMED, batch_size=12, sample_weight=weights, verbose=0)


BAD_COMPILES = {
    "no loss in it": (ConfigError, {"a": None}, None, "no loss in it"),
    "an unknown name": (UnknownNameError, {"a": "msee"}, None, "'mse'"),
    "sums and means": (
        UnsupportedError,
        {"a": nn.MSELoss(reduction="sum"), "b": "mse"},
        None,
        "one kind",
    ),
    "a weight of nobody": (ConfigError, BOTH, {"c": 1.0}, "'c'.*for 'b', 'a'"),
    "fewer weights": (ConfigError, ["mse", "mse"], [1.0], "for output 1, and losses"),
    "a weight for two losses": (ConfigError, BOTH, 0.5, "all outputs together, and"),
    "weights of no loss": (ConfigError, None, [1.0], "got no loss"),
    "a negative weight": (ConfigError, BOTH, {"a": -1.0}, r"\['a'\]=-1\.0"),
    "an infinite weight": (ConfigError, "mse", float("inf"), "inf"),
}


@pytest.mark.parametrize("name", BAD_COMPILES)
def test_what_can_not_be_meant_is_refused(name):
    error, loss, weights, message = BAD_COMPILES[name]
    with pytest.raises(error, match=message):
        IPUModel(Two()).compile("sgd", loss, loss_weights=weights)


def test_two_models_may_have_one_metric():
    median, figures = Median(), []
    for _ in range(2):
        model = reference.compiled(metrics=[median])
        figures.append(model.evaluate(X, CLASSES, verbose=0))
    assert figures[0] == figures[1]
    assert not hasattr(median, "seen")


@pytest.mark.parametrize("name", ["loss", "mae"])
def test_two_figures_of_one_name_are_refused(name):
    class Logging(nn.Linear):
        def forward(self, x):
            log(name, x.mean())
            return super().forward(x)

    model = reference.compiled(Logging(3, 1), loss="mse", metrics=["mse", "mae"])
    with pytest.raises(ConfigError, match=f"Two metrics are called '{name}'"):
        model.fit(X, NUMBERS, batch_size=12, verbose=0)
