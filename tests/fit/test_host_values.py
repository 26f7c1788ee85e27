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
)
from tests import reference

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


@pytest.mark.parametrize(("how", "settings"), HOW, ids=str)
def test_a_value_counts_from_the_next_call_on(how, settings, moves):
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
    assert moves["compiled"] == 1
    assert moves["down"] == 1  # the end of the fit


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32, torch.bool])
def test_evaluate_and_predict_have_the_value_of_now(dtype, moves):
    model = reference.compiled(Annealed(1, dtype))
    for value in (1, 0, 1):
        model.module.scale.fill_(value)
        with torch.no_grad():
            torch.testing.assert_close(model.predict(X, verbose=0), model.module(X))
    assert moves["compiled"] == 1
    assert moves["up"] <= 1  # at the compilation


KINDS = {
    "another type": lambda: torch.tensor(3.0, dtype=torch.float64),
    "a whole number": lambda: torch.tensor(3),
    "several values": lambda: torch.tensor([3.0, 1.0, 2.0, 0.5]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_another_kind_is_compiled_anew(kind):
    model = reference.compiled(Annealed())
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

    model = reference.compiled(Annealed())
    with pytest.raises(ConfigError, match=r"module\.scale was 0-d buffer of .*float32"):
        model.fit(X, Y, batch_size=8, callbacks=Change(), verbose=0)


def test_a_value_that_32_bits_cannot_hold_is_refused():
    class Change(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.module.scale.fill_(2**40)

    model = reference.compiled(Annealed(1, torch.int64))
    match = f"^The buffer scale has {2**40}:"
    with pytest.raises(UnsupportedError, match=match):
        model.fit(X, Y, batch_size=8, callbacks=Change(), verbose=0)


def test_a_value_that_is_gone_is_the_error_that_is_raised():
    class Remove(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.module.scale = None

    model = reference.compiled(Annealed())
    with pytest.warns(IpufitWarning, match="Something else failed"), pytest.raises(
        ConfigError, match=r"module\.scale was .* is None now"
    ):
        model.fit(X, Y, batch_size=8, callbacks=Remove(), verbose=0)


class Moving(Annealed):
    """Changes its buffer itself, whenever it runs."""

    def forward(self, x):
        self.scale.mul_(2.0)
        return super().forward(x)


def test_a_value_that_forward_changes_stays_on_the_device(moves):
    model = reference.compiled(Moving())
    model.fit(X, Y, batch_size=8, verbose=0)
    assert float(model.module.scale) == 16.0
    moves.taken()
    model.fit(X, Y, batch_size=8, verbose=0)
    assert moves.taken() == {"compiled": 0, "up": 0, "down": 1}


# Wide values --------------------------------------------------------------------------


FIT = {"batch_size": 8, "verbose": 0}
EXACT = torch.tensor([0.1, 1 / 3, float("nan")], dtype=torch.float64)


class Net(torch.nn.Module):
    """Reads one float64 buffer, and counts in another one."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)
        self.register_buffer("scale", EXACT.clone())
        self.register_buffer("count", EXACT.clone())
        self.register_buffer("number", torch.tensor([7]))

    def forward(self, x):
        if self.training:
            self.count.add_(1.0)
        return self.layer(x * self.scale[:2].sum().to(x.dtype)) + self.number


def make(config=None):
    return reference.compiled(Net(), config or IPUConfig())


def same(one, other):
    return torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))


@pytest.mark.parametrize("validates", [False, True])
def test_what_no_program_changes_keeps_its_digits(validates):
    model = make()
    data = {"validation_data": (X, Y)} if validates else {}
    for epochs in (1, 2):
        model.fit(X, Y, epochs=epochs, **data, **FIT)
        assert same(model.module.scale, EXACT)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert same(model.module.scale, EXACT)


def test_what_a_program_changes_comes_back():
    model = make()
    model.fit(X, Y, epochs=2, **FIT)
    assert torch.allclose(model.module.count[:2], EXACT[:2] + 8)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40])
def test_integers_that_do_not_fit_are_refused(value):
    model = make()
    model.module.number.fill_(value)
    for run in (lambda: model.fit(X, Y, **FIT), lambda: model.predict(X, verbose=0)):
        with pytest.raises(UnsupportedError, match=f"^The buffer number has {value}:"):
            run()
    model.module.number.fill_(2**31 - 1)
    model.fit(X, Y, **FIT)


@pytest.mark.parametrize("value", [2**33, [2**33, 1, 1, 1]])
def test_integers_of_a_loss_that_do_not_fit_are_refused(value):
    class Weighted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("share", torch.tensor(value))

        def forward(self, outputs, targets):
            return (
                torch.nn.functional.cross_entropy(outputs, targets) * self.share
            ).mean()

    model = make()
    model.compile("sgd", Weighted())
    with pytest.raises(UnsupportedError, match=f"The buffer .*share has {2**33}:"):
        model.fit(X, Y, **FIT)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize(
    "run", [lambda m: m.fit(X, Y, **FIT), lambda m: m.predict(X, verbose=0)]
)
def test_complex_weights_are_refused(kind, run):
    module, weight = Net(), torch.zeros(3, dtype=torch.complex64)
    if kind == "parameter":
        module.register_parameter("phase", torch.nn.Parameter(weight))
    else:
        module.register_buffer("phase", weight)
    model = reference.compiled(module)
    match = f"The {kind} phase is of torch.complex64, .*torch.view_as_real"
    with pytest.raises(UnsupportedError, match=match):
        run(model)
