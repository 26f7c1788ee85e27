# SPDX-License-Identifier: Apache-2.0
"""Outputs in objects: they come back as what they are, or are refused."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import pytest
import torch
from torch import nn

from ipufit import ConfigError, IPUModel, UnsupportedError
from tests import reference

X, Y = reference.samples(32)


@dataclasses.dataclass
class Data:
    logits: Any
    note: str = "a"
    count: int = 3


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
    module = Returning(Data)
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


def test_a_name_that_an_object_does_not_have_is_refused():
    model = IPUModel(Returning(Data))
    model.compile("sgd", {"logit": "cross_entropy"})
    with pytest.raises(ConfigError, match=r"output 'logit', and the model returns"):
        model.fit(X, Y, verbose=0)
