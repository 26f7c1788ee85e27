# SPDX-License-Identifier: Apache-2.0
"""Arithmetic and functions of single elements as a device computes them."""

import math

import pytest
import torch

import ipufit.emulator as poptorch
from tests.emulator.operators._programs import gradients, infer, reports

NAN, INF = math.nan, math.inf
HALF_PI = math.pi / 2


def in_place(operator):
    def function(x):
        x = x * 1
        getattr(x, operator)(0.1)
        return x

    return function


@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (lambda x: x // 0.1, [1.0, -1.0], [10.0, -10.0]),
        (lambda x: 1.0 // x, [0.1, 3.0], [10.0, 0.0]),
        (in_place("floor_divide_"), [1.0], [10.0]),
        (lambda x: x % 1.0, [1e-9, -1e-9, -0.25, 2.5], [0.0, 0.0, 0.75, 0.5]),
        (lambda x: x % -2.0, [3.0, -3.0, 2.0], [-1.0, -1.0, 0.0]),
        (lambda x: torch.remainder(input=x, other=INF), [3.0], [NAN]),
        (lambda x: -7.5 % x, [2.0, -2.0], [0.5, -1.5]),
        (in_place("remainder_"), [0.25], [0.05]),
        (lambda x: (x * 1).reciprocal_(), [4.0], [0.25]),
        (lambda x: torch.round(x, decimals=2), [1.236, -0.5], [1.0, 0.0]),
        (torch.round, [1.5, 2.5], [2.0, 2.0]),
        (lambda x: torch.rsub(x, 1.0, alpha=3), [5.0], [-4.0]),
        (lambda x: 1.0 - x, [5.0], [-4.0]),
        (torch.asinh, [1.0, -1e4, -1000.0, 1e20], [0.881374, -INF, -7.624619, INF]),
        (torch.acosh, [1.0, 2.0, 1e20, -1e4], [0.0, 1.316958, INF, -INF]),
        (torch.atan, [1.0, 5000.0, 1e20], [math.pi / 4, HALF_PI, 0.0]),
        (torch.erfc, [0.0, 1.0, 5.0], [1.0, 0.1572992, 0.0]),
    ],
)
def test_a_device_computes(function, x, expected):
    device = infer(function, torch.tensor(x))
    torch.testing.assert_close(
        device, torch.tensor(expected), equal_nan=True, atol=1e-6, rtol=1e-5
    )


def test_whole_powers_with_negative_exponents_are_0():
    base, exponent = torch.tensor([1, -1, 2, 3]), torch.tensor([-2, -3, -1, 2])
    assert infer(torch.pow, base.int(), exponent.int()).tolist() == [0, 0, 0, 9]


def test_erf_of_half_precision_is_a_polynomial_of_degree_3():
    x = torch.tensor([0.067, -1.0, 0.0]).half()
    t = 1 / (1 + 0.47047 * x.abs().double())
    series = 0.3480242 * t - 0.0958798 * t**2 + 0.7478556 * t**3
    hastings = (1 - series * (-(x.double() ** 2)).exp()).copysign(x.double())
    torch.testing.assert_close(
        infer(torch.erf, x).double(), hastings, atol=5e-4, rtol=0
    )
    exact = infer(torch.erf, x.float())
    torch.testing.assert_close(exact, torch.erf(x.float()))
    assert infer(torch.erfc, torch.tensor([2.7]).half()) == 0  # erf rounds to 1


def test_addmm_with_beta_0_keeps_nan():
    bias, x = torch.tensor([NAN, 1.0]), torch.eye(2)
    device = infer(lambda b, x: torch.addmm(b, x, x, beta=0), bias, x)
    assert device.isnan().tolist() == [[True, False], [True, False]]


X, Y = torch.tensor([5.5, -5.5]), torch.tensor([2.0, 2.0])
TIE, LESS = torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("function", "weights", "expected"),
    [
        (torch.fmod, [X, Y], [[1.0, 1.0], [0.0, 0.0]]),
        (torch.remainder, [X, Y], [[1.0, 1.0], [1.0, 1.0]]),
        (torch.maximum, [TIE, LESS], [[1.0, 1.0], [1.0, 0.0]]),
        (torch.max, [TIE, LESS], [[1.0, 1.0], [1.0, 0.0]]),
        (torch.minimum, [TIE, LESS], [[1.0, 0.0], [1.0, 1.0]]),
        (lambda x: torch.maximum(x, torch.zeros(1)), [torch.zeros(2)], [[1.0, 1.0]]),
        (lambda x, y: x.clamp(y, y + 1), [LESS, TIE], [[1.0, 0.0], [1.0, 1.0]]),
        (torch.trunc, [X], [[0.0, 0.0]]),
        (torch.sgn, [X], [[0.0, 0.0]]),
        (lambda x: (x * 1).reciprocal_(), [Y], [[-0.25, -0.25]]),
        (lambda x: (x * 1).normal_(0.0, 2.0), [X], [[0.0, 0.0]]),
        (torch.erfc, [torch.zeros(1)], [[-2 / math.sqrt(math.pi)]]),
        (torch.atan, [torch.ones(1)], [[0.5]]),
        (torch.asinh, [torch.ones(1)], [[math.sqrt(0.5)]]),
    ],
)
def test_a_gradient_on_a_device(function, weights, expected):
    found = gradients(lambda *w: function(*w).sum(), weights=weights)
    for gradient, one in zip(found, expected):
        torch.testing.assert_close(gradient, torch.tensor(one))


def test_weight_decay_does_not_reach_a_weight_behind_trunc():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.other = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            loss = (self.weight.trunc() + self.other * x).sum()
            return poptorch.identity_loss(loss, reduction="none")

    model = Model()
    sgd = poptorch.optim.SGD(model.parameters(), lr=0.5, weight_decay=1.0)
    training = poptorch.trainingModel(model, poptorch.Options(), sgd)
    training(torch.zeros(1))
    training.copyWeightsToHost()
    training.destroy()
    assert (model.weight.item(), model.other.item()) == (1.0, 0.5)


ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("function", "given", "words"),
    [
        (lambda x: x // 2, [ONES], "floor(x / y)"),
        (lambda x: x % 2, [ONES], ""),
        (torch.asinh, [ONES], "cancels for negative x"),
        (torch.atan, [ONES], ""),
        (lambda x: x % 2, [ONES.int()], ""),
        (lambda x: x.round(decimals=1), [ONES], "ignores decimals"),
        (torch.round, [ONES], ""),
        (torch.maximum, [ONES, ONES], ""),
        (torch.add, [ONES > 0, ONES > 0], ""),
        (lambda x: torch.add(x, x, alpha=2), [ONES > 0], "alpha"),
    ],
)
def test_what_a_check_says(function, given, words):
    said = reports(function, *given)
    assert (words in said[0]) if words else not said


@pytest.mark.parametrize(
    ("divide", "is_reported"),
    [
        (lambda w, x: x / w, True),
        (lambda w, x: 2 / w, True),
        (lambda w, x: w.reciprocal(), True),
        (lambda w, x: (w * 1).reciprocal_(), True),
        (lambda w, x: w / x, False),
        (lambda w, x: x / w.float(), False),
    ],
)
def test_the_gradient_of_a_divisor_in_half_precision_is_reported(divide, is_reported):
    layer = torch.nn.Linear(3, 3).half()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return divide(self.layer(x), x).float()

    said = reports(Model(), ONES.half(), trains=True)
    assert any("y^2" in message for message in said) == is_reported
