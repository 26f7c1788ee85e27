# SPDX-License-Identifier: Apache-2.0
"""The loss that a model returns itself, and outputs in objects."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ipufit import (
    ConfigError,
    DataError,
    IPUConfig,
    IPUModel,
    UnsupportedError,
    poptorch,
)
from tests import reference
from tests.fit.model_outputs import ModelOutput


class Named(NamedTuple):
    logits: Any
    loss: Any
    rest: Any


@dataclasses.dataclass(frozen=True)
class Returned:
    logits: Any
    loss: Any = None
    note: str = "a"


class OwnLoss(nn.Module):
    """A classifier that computes its loss, and returns it as it was told."""

    def __init__(self, kind):
        super().__init__()
        self.net = reference.network()
        self._kind = kind

    def forward(self, x, labels=None):
        logits = self.net(x)
        if labels is None:
            return logits
        loss = nn.functional.cross_entropy(logits, labels)
        part = loss * 2
        if self._kind == "earlier mark":
            part = poptorch.identity_loss(part, reduction="mean")
        parts = {"part": part} if self.training else {}
        if "mark" in self._kind:
            loss = poptorch.identity_loss(loss, reduction="mean")
        return {
            "dict": {"loss": loss, "logits": logits},
            "tuple": (loss, logits),
            "alone": loss,
            "tutorial": (logits, loss),
            "marked tuple": (logits, loss),
            "marked in the middle": (logits, loss, logits),
            "marked dict": {"logits": logits, "total": loss},
            "marked alone": loss,
            "earlier mark": {"logits": logits, "total": loss, **parts},
            "count": (torch.ones((), dtype=torch.int32), logits, loss),
            "list": [logits, loss],
            "[1]": OrderedDict(loss=loss.reshape(1), logits=logits),
            "no loss": {"loss": None, "logits": logits},
            "two scalars": (loss, logits, loss * 2),
            "two elements": {"loss": torch.stack([loss, loss]), "logits": logits},
            "namespace": types.SimpleNamespace(loss=loss, logits=logits),
            "data class": Returned(logits, loss),
            "named tuple": Named(logits, loss, logits),
            "model output": ModelOutput(loss=loss, logits=logits),
        }[self._kind]


KINDS = [
    "earlier mark",
    "list",
    "[1]",
    "dict",
    "tuple",
    "alone",
    "tutorial",
    "marked tuple",
    "marked in the middle",
    "marked dict",
    "marked alone",
    "namespace",
    "data class",
    "named tuple",
    "model output",
]


X, Y = reference.samples(48)
INPUTS = {"x": X, "labels": Y}
CONFIGS = [
    IPUConfig(),
    IPUConfig(replicas=2, device_iterations=2),
    IPUConfig(gradient_accumulation=3, pipeline=("net.0", "net.2")),
]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        *((CONFIGS[1], kind) for kind in KINDS),
        *((config, kind) for config in CONFIGS[::2] for kind in KINDS[::7]),
    ],
)
def test_a_module_with_its_own_loss_trains_as_a_plain_loop(monkeypatch, config, kind):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "8")
    module = OwnLoss(kind)
    twin = copy.deepcopy(module.net)
    model = IPUModel(module, config)
    model.compile(torch.optim.SGD(module.parameters(), lr=0.5))
    validation = {name: value[:7] for name, value in INPUTS.items()}
    history = model.fit(
        INPUTS,
        batch_size=12,
        epochs=2,
        shuffle=False,
        validation_data=validation,
        validation_batch_size=4,
        verbose=0,
    ).history
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for epoch in range(2):
        trained = reference.train(twin, optimizer, X, Y, 12)
        assert history["loss"][epoch] == pytest.approx(
            trained.figures()["loss"], rel=1e-5
        )
        expected = reference.evaluate(twin, X[:7], Y[:7])["loss"]
        assert history["val_loss"][epoch] == pytest.approx(expected, rel=1e-4)
    reference.assert_same_weights(module.net, twin)
    model.detach()


@pytest.mark.parametrize(
    ("config", "kind"), [*zip(CONFIGS, ["dict", "tutorial", "marked tuple"])]
)
def test_evaluate_is_exact_for_every_number_of_samples(monkeypatch, config, kind):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "8")
    model = IPUModel(OwnLoss(kind), config)
    model.compile("sgd", metrics=["accuracy"])
    rows = config.inference_plan(4).samples_per_call
    for count in range(1, 2 * rows + 2):
        x, y = reference.samples(count, seed=count)
        figures = model.evaluate({"x": x, "labels": y}, y, batch_size=4, verbose=0)
        expected = reference.evaluate(model.module.net, x, y)
        assert figures == pytest.approx(expected, rel=1e-4), count
    model.detach()


@pytest.mark.parametrize("kind", ["dict", "tuple", "tutorial"])
def test_predictions_are_without_the_loss(kind):
    model = IPUModel(OwnLoss(kind))
    model.compile("sgd")
    predicted = model.predict(INPUTS, batch_size=5, verbose=0)
    logits = predicted["logits"] if "dict" in kind else predicted
    with torch.no_grad():
        torch.testing.assert_close(logits, model.module.net(X))
    if "dict" in kind:
        assert list(predicted) == ["logits"]


@pytest.mark.parametrize("kind", ["namespace", "data class", "model output"])
def test_objects_are_predicted_as_what_they_are_without_the_loss(kind):
    model = IPUModel(OwnLoss(kind))
    model.compile("sgd")
    model.fit(INPUTS, batch_size=12, verbose=0)
    predicted = model.predict(INPUTS, batch_size=5, verbose=0)
    with torch.no_grad():
        returned = model.module(X, Y)
    assert type(predicted) is type(returned)
    assert predicted.loss is None
    torch.testing.assert_close(predicted.logits, returned.logits)
    if kind == "model output":
        assert list(predicted) == ["logits"]
        assert predicted["logits"] is predicted.logits


def test_a_metric_gets_the_object_without_the_loss():
    def share(outputs, targets):
        assert outputs.loss is None
        return (outputs.logits.argmax(1) == targets).float()

    model = IPUModel(OwnLoss("data class"))
    model.compile("sgd", metrics=[share])
    figures = model.evaluate(INPUTS, Y, verbose=0)
    expected = reference.evaluate(model.module.net, X, Y)
    assert figures["share"] == pytest.approx(expected["accuracy"])
    assert figures["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no loss", r"There is no loss.*\(output, loss\).*compile\(\)"),
        ("two scalars", "first and the last are scalars"),
        ("two elements", r"shape \(2,\)"),
    ],
)
def test_what_is_not_understood_as_a_loss_is_refused(kind, message):
    model = IPUModel(OwnLoss(kind))
    model.compile("sgd")
    with pytest.raises(ConfigError, match=message):
        model.fit(INPUTS, batch_size=12, verbose=0)


def test_a_whole_number_at_the_beginning_of_a_tuple_is_no_loss():
    model = IPUModel(OwnLoss("count"))
    model.compile("sgd")
    loss = model.fit(INPUTS, batch_size=48, verbose=0).history["loss"]
    expected = reference.evaluate(OwnLoss("dict").net, X, Y)["loss"]
    assert loss == [pytest.approx(expected, rel=1e-5)]


class ByMode(OwnLoss):
    """As PopTorch's tutorials have it: a loss while it trains."""

    def forward(self, x, labels=None):
        logits = self.net(x)
        if self.training:
            return logits, nn.functional.cross_entropy(logits, labels)
        return logits


def test_a_module_that_returns_its_loss_in_training_only_says_so():
    model = IPUModel(ByMode("tutorial"))
    model.compile("sgd")
    model.fit(INPUTS, batch_size=12, verbose=0)
    assert model.predict({"x": X}, verbose=0).shape == (48, 4)
    with pytest.raises(ConfigError, match=r"in eval mode the module.*labels is not"):
        model.evaluate(INPUTS, verbose=0)


@pytest.mark.parametrize("make", [OwnLoss, ByMode])
def test_targets_that_the_module_would_need_are_asked_for(make):
    model = IPUModel(make("tutorial"))
    model.compile("sgd")
    with pytest.raises(ConfigError, match=r"doesn't get the targets.*'labels': y"):
        model.fit(X, Y, batch_size=12, verbose=0)


class Summed(OwnLoss):
    """Its loss is a sum over samples, marked or built in."""

    def forward(self, x, labels):
        logits = self.net(x)
        if self._kind == "marked":
            each = nn.functional.cross_entropy(logits, labels, reduction="none")
            return logits, poptorch.identity_loss(each, reduction="sum")
        return logits, nn.functional.cross_entropy(logits, labels, reduction="sum")


@pytest.mark.parametrize("kind", ["marked", "built in"])
def test_an_own_loss_that_is_a_sum_would_depend_on_the_micro_batch(kind):
    model = IPUModel(Summed(kind))
    model.compile("sgd")
    for run in (model.fit, model.evaluate):
        with pytest.raises(ConfigError, match="reduction='mean'"):
            run(INPUTS, batch_size=12, verbose=0)
    alone = IPUModel(model.module, IPUConfig(micro_batch_size=1))
    alone.compile("sgd")
    expected = reference.evaluate(model.module.net, X, Y)["loss"]
    assert alone.evaluate(INPUTS, batch_size=1, verbose=0)["loss"] == pytest.approx(
        expected, rel=1e-4
    )


def test_metrics_of_a_module_with_its_own_loss_need_targets():
    model = IPUModel(OwnLoss("dict"))
    model.compile("sgd", metrics=["accuracy"])
    with pytest.raises(DataError, match="no targets to compute metrics"):
        model.fit(INPUTS, verbose=0)


# Outputs in objects -------------------------------------------------------------------


class Returning(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.net = reference.network()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(self.net(x))


class Own:
    def __init__(self, logits):
        self.parts = {"logits": [logits]}


HIDDEN = {
    "own": (Own, r"a Own, with a tensor at outputs\.parts\['logits'\]\[0\]"),
    "in a list": (lambda t: [t, Own(t)], r"outputs\[1\]\.parts"),
    "set": (lambda t: {t}, "a set, with a tensor"),
    "generator": (lambda t: (part for part in [t]), "a generator"),
    "closure": (lambda t: lambda: t, "closure variable t"),
    "partial": (lambda t: functools.partial(print, t), r"outputs\.args\[0\]"),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_tensor_in_any_other_object_is_refused(kind):
    wrap, message = HIDDEN[kind]
    model = IPUModel(Returning(wrap))
    with pytest.raises(UnsupportedError, match=message):
        model.predict(X, verbose=0)


def test_training_on_such_an_object_is_right():
    """The loss is computed while it is traced, from the tensors themselves."""
    module = Returning(lambda t: torch.distributions.Categorical(logits=t))
    model = IPUModel(module)
    model.compile(
        torch.optim.SGD(module.parameters(), lr=0.0),
        lambda outputs, targets: -outputs.log_prob(targets),
    )
    (loss,) = model.fit(X, Y, batch_size=8, verbose=0).history["loss"]
    with torch.no_grad():
        expected = nn.functional.cross_entropy(module.net(X), Y)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(UnsupportedError, match="Categorical"):
        model.evaluate(X, Y, verbose=0)


def test_names_take_the_only_tensor_of_an_object():
    module = Returning(Returned)
    model = IPUModel(module)
    model.compile(
        torch.optim.SGD(module.parameters(), lr=0.0),
        "cross_entropy",
        metrics=["accuracy"],
    )
    history = model.fit(X, Y, batch_size=8, verbose=0).history
    with torch.no_grad():
        logits = module.net(X)
    expected = {
        "loss": float(nn.functional.cross_entropy(logits, Y)),
        "accuracy": float((logits.argmax(1) == Y).float().mean()),
    }
    assert {name: value for name, (value,) in history.items()} == pytest.approx(
        expected, rel=1e-5
    )
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(expected, rel=1e-5)


def test_the_tensors_of_an_object_are_outputs_by_their_names():
    module = Returning(lambda t: types.SimpleNamespace(a=t, b=2 * t, note="n"))
    model = IPUModel(module)
    model.compile(
        torch.optim.SGD(module.parameters(), lr=0.0),
        {"b": "cross_entropy"},
        metrics={"a": ["accuracy"]},
    )
    history = model.fit(X, {"a": Y, "b": Y}, batch_size=8, verbose=0).history
    with torch.no_grad():
        logits = module.net(X)
    loss = float(nn.functional.cross_entropy(2 * logits, Y))
    assert history["loss"] == [pytest.approx(loss, rel=1e-5)]
    accuracy = float((logits.argmax(1) == Y).float().mean())
    assert history["a_accuracy"] == [pytest.approx(accuracy)]
