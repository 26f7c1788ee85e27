# SPDX-License-Identifier: Apache-2.0
"""`Options.Precision.enableFloatingPointExceptions`."""

import math

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import Function, run


def options(is_checking):
    chosen = poptorch.Options()
    chosen.Precision.enableFloatingPointExceptions(is_checking)
    return chosen


ONES, ZEROS = torch.ones(2), torch.zeros(2)
INFINITE, NAN = torch.full((2,), math.inf), torch.full((2,), math.nan)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.add, (ONES, ONES)),
        (torch.add, (INFINITE, ONES)),  # no operation made this infinity
        (torch.add, (NAN, ONES)),
        (torch.div, (ZEROS, ONES)),
        (lambda x: x.masked_fill(x > 0, -math.inf), (ONES,)),
        (lambda x: x + torch.triu(torch.full((2, 2), -math.inf), 1), (ONES,)),
        (lambda x: x + torch.empty(2).fill_(1.0), (ONES,)),
    ],
)
def test_what_is_no_exception_passes(function, args):
    checked = run(function, *args, options=options(True))
    torch.testing.assert_close(checked, function(*args), equal_nan=True)


def test_the_message_names_the_function():
    with pytest.raises(poptorch.Error, match="`log` gave infinity"):
        run(torch.log, ZEROS, options=options(True))


@pytest.mark.parametrize("function", [nn.ELU(), nn.SELU(), nn.CELU(), torch.selu_])
def test_an_elu_of_a_large_number_overflows(function):
    with pytest.raises(poptorch.Error, match="overflows"):
        run(lambda x: function(x * 100), ONES, options=options(True))
    run(lambda x: function(x * 80), ONES, options=options(True))


def test_a_gradient_that_overflows_stops_the_update():
    def forward(self, x):
        # The root is 0, its slope isn't finite.
        return poptorch.identity_loss((self.weight * x).sqrt(), reduction="sum")

    for is_checking in (False, True):
        model = Function(forward, weight=nn.Parameter(torch.zeros(1)))
        sgd = poptorch.optim.SGD(model.parameters(), lr=1.0)
        training = poptorch.trainingModel(model, options(is_checking), sgd)
        if is_checking:
            with pytest.raises(poptorch.Error, match="gradient of weight"):
                training(torch.ones(1))
            assert model.weight.item() == 0
        else:
            training(torch.ones(1))
            assert not model.weight.isfinite().all()


def test_a_comparison_of_half_precision_is_checked():
    with pytest.raises(poptorch.Error, match="`lt` compared a NaN"):
        run(torch.lt, NAN.half(), ONES.half(), options=options(True))


def logarithm(self, x):
    return poptorch.identity_loss(self.weight * x.log(), reduction="sum")


def training(**factors):
    chosen = options(True).deviceIterations(factors.get("D", 1))
    chosen.Training.gradientAccumulation(factors.get("G", 1))
    model = Function(logarithm, weight=nn.Parameter(torch.ones(1)))
    sgd = poptorch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    return model, sgd, poptorch.trainingModel(model, chosen, sgd)


def test_updates_before_a_failure_come_back():
    model, sgd, executor = training(D=2)
    executor.compile(torch.ones(2))
    assert sgd.state_dict()["ipu_state"]["Accl1___weight"].item() == 0
    with pytest.raises(poptorch.Error, match="Floating point exception"):
        executor(torch.tensor([math.e, -1.0]))
    assert model.weight.item() == pytest.approx(0.0, abs=1e-6)
    velocity = sgd.state_dict()["ipu_state"]["Accl1___weight"]
    assert velocity.item() == pytest.approx(1.0)
