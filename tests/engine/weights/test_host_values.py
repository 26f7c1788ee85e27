# SPDX-License-Identifier: Apache-2.0
"""0-d buffers: values that may change at any time, without a compilation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ipufit import (
    Callback,
    ConfigError,
    IPUConfig,
    IpufitWarning,
    IPUModel,
    UnsupportedError,
    poptorch,
)
from tests import reference
from tests.engine.counting import Moves

X, Y = reference.samples(32)
HOW = [
    ("fill", {"device_iterations": 2}),
    ("data", {"gradient_accumulation": 2}),
    ("data", {"replicas": 2}),
    ("assigned", {}),
]


class Annealed(nn.Module):
    """A network whose outputs are scaled by a 0-d buffer."""

    def __init__(self, value=1.0, dtype=torch.float32):
        super().__init__()
        self.net = reference.network()
        self.register_buffer("scale", torch.tensor(value, dtype=dtype))

    def forward(self, x):
        return self.net(x) * self.scale


class Schedule(Callback):
    """Sets a value before every call, in one of the ways that users do."""

    def __init__(self, values, how="fill"):
        self.values, self.how, self.module = iter(values), how, None

    def on_train_batch_begin(self, batch, logs=None):
        module, value = self.module or self.model.module, next(self.values)
        if self.how == "fill":
            module.scale.fill_(value)
        elif self.how == "data":
            module.scale.data = torch.tensor(value)
        else:
            module.scale = torch.tensor(value)


def trained(module, values, rows):
    """A plain loop of SGD with a value for each update; all updates' losses."""
    optimizer = torch.optim.SGD(module.net.parameters(), lr=0.1)
    losses = []
    for value, start in zip(values, range(0, len(X), rows)):
        module.scale.fill_(value)
        inputs, targets = X[start : start + rows], Y[start : start + rows]
        loss = nn.functional.cross_entropy(module(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def counted(monkeypatch):
    """Names of what PopTorch was asked for."""
    calls = []
    for name in ("compile", "copyWeightsToDevice", "copyWeightsToHost"):
        original = getattr(poptorch.PoplarExecutor, name)

        def noted(self, *args, name=name, original=original):
            calls.append(name)
            return original(self, *args)

        monkeypatch.setattr(poptorch.PoplarExecutor, name, noted)
    return calls


@pytest.mark.parametrize(("how", "settings"), HOW, ids=str)
def test_a_value_counts_from_the_next_call_on(how, settings, counted):
    module = Annealed()
    plain = copy.deepcopy(module)
    model = IPUModel(module, IPUConfig(**settings))
    model.compile(torch.optim.SGD(module.parameters(), lr=0.1), "cross_entropy")
    values = [1.0, 0.25, 4.0, -2.0]
    updates = settings.get("device_iterations", 1)
    losses = trained(plain, values, 8) if updates == 1 else None
    if losses is None:
        values = values[:2]
        losses = trained(plain, [values[0], values[0], values[1], values[1]], 8)
    history = model.fit(
        X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=Schedule(values, how)
    )
    assert history.history["loss"] == [pytest.approx(sum(losses) / 4, rel=1e-5)]
    for mine, theirs in zip(module.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.detach(), theirs.detach())
    assert float(module.scale) == values[-1]
    assert counted.count("compile") == 1
    assert counted.count("copyWeightsToHost") == 1  # the end of the fit


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32, torch.bool])
def test_evaluate_and_predict_have_the_value_of_now(dtype, counted):
    model = IPUModel(Annealed(1, dtype))
    model.compile("sgd", "cross_entropy")
    for value in (1, 0, 1):
        model.module.scale.fill_(value)
        with torch.no_grad():
            torch.testing.assert_close(model.predict(X, verbose=0), model.module(X))
    assert counted.count("compile") == 1
    assert counted.count("copyWeightsToDevice") <= 1  # at the compilation


KINDS = {
    "another type": lambda: torch.tensor(3.0, dtype=torch.float64),
    "a whole number": lambda: torch.tensor(3),
    "several values": lambda: torch.tensor([3.0, 1.0, 2.0, 0.5]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_another_kind_is_compiled_anew(kind):
    model = IPUModel(Annealed())
    model.compile("sgd", "cross_entropy")
    for value in (KINDS[kind](), torch.tensor(2.0)):
        model.fit(X, Y, batch_size=8, verbose=0)
        model.module.scale = value
        with torch.no_grad():
            predicted = model.predict(X, verbose=0)
            torch.testing.assert_close(predicted, model.module(X).float())
    model.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_another_kind_is_refused_in_mid_fit(kind):
    class Change(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.module.scale = KINDS[kind]()

    model = IPUModel(Annealed())
    model.compile("sgd", "cross_entropy")
    with pytest.raises(ConfigError, match=r"module\.scale was 0-d buffer of .*float32"):
        model.fit(X, Y, batch_size=8, callbacks=Change(), verbose=0)


def test_a_value_that_32_bits_cannot_hold_is_refused():
    class Change(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.module.scale.fill_(2**40)

    model = IPUModel(Annealed(1, torch.int64))
    model.compile("sgd", "cross_entropy")
    match = f"^The buffer scale has {2**40}:"
    with pytest.raises(UnsupportedError, match=match):
        model.fit(X, Y, batch_size=8, callbacks=Change(), verbose=0)


def test_a_value_that_is_gone_is_the_error_that_is_raised():
    class Remove(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.module.scale = None

    model = IPUModel(Annealed())
    model.compile("sgd", "cross_entropy")
    with pytest.warns(IpufitWarning, match="Something else failed"), pytest.raises(
        ConfigError, match=r"module\.scale was .* is None now"
    ):
        model.fit(X, Y, batch_size=8, callbacks=Remove(), verbose=0)


class Moving(Annealed):
    """Changes its buffer itself, whenever it runs."""

    def forward(self, x):
        self.scale.mul_(2.0)
        return super().forward(x)


def test_a_value_that_forward_changes_stays_on_the_device(monkeypatch):
    model = IPUModel(Moving(), IPUConfig())
    model.compile("sgd", "cross_entropy")
    model.fit(X, Y, batch_size=8, verbose=0)
    assert float(model.module.scale) == 16.0
    moves = Moves().watch(monkeypatch)
    model.fit(X, Y, batch_size=8, verbose=0)
    moves.stop()
    assert moves.taken() == {"compiled": 0, "up": 0, "down": 1}
