# SPDX-License-Identifier: Apache-2.0
"""float64 weights keep their digits, int64 ones must fit, and none is complex."""

from __future__ import annotations

import pytest
import torch

from ipufit import Callback, IPUConfig, IPUModel, UnsupportedError
from tests import reference

X, Y = reference.samples(16)
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
    model = IPUModel(Net(), config or IPUConfig())
    model.compile("sgd", "cross_entropy")
    return model


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
    assert torch.allclose(model.module.count[:2], EXACT[:2] + 4)


def test_what_a_callback_reads_changes_nothing():
    class Reads(Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert torch.allclose(self.model.module.scale[:2], EXACT[:2])

    model = make()
    model.fit(X, Y, callbacks=Reads(), **FIT)
    assert same(model.module.scale, EXACT)


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
    model = IPUModel(module)
    model.compile("sgd", "cross_entropy")
    match = f"The {kind} phase is of torch.complex64, .*torch.view_as_real"
    with pytest.raises(UnsupportedError, match=match):
        run(model)
