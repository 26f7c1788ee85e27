# SPDX-License-Identifier: Apache-2.0
"""Activations as a device computes them."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.emulator.operators._programs import (
    as_module,
    gradients,
    infer,
    reports,
    trained,
)

NAN, INF = math.nan, math.inf


def test_exact_gelu_is_the_tanh_form():
    x = torch.linspace(-4, 4, 50)
    device = infer(functional.gelu, x)
    torch.testing.assert_close(device, functional.gelu(x, approximate="tanh"))
    assert not torch.allclose(device, functional.gelu(x), atol=1e-5)
    assert "the tanh form" in reports(functional.gelu, x)[0]
    assert not reports(lambda x: functional.gelu(x, approximate="tanh"), x)


def test_mish_in_float16_is_0_where_the_square_of_a_sigmoid_rounds_to_1():
    device = infer(functional.mish, torch.tensor([-9.0, -2.0]).half())
    torch.testing.assert_close(device, torch.tensor([0, -0.2524]).half())


def test_nothing_before_a_prelu_trains():
    network = nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2))
    changed = trained(network, torch.randn(5, 3))
    assert changed == {"2.weight", "2.bias"}
    assert "has no gradient" in reports(network, torch.randn(5, 3), trains=True)[0]
    assert not reports(network, torch.randn(5, 3))


@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (
            lambda x: functional.celu(x, 2.0),
            [-1.0, 0.0, 3.0],
            [2 / math.e - 2, 0.0, 3.0],
        ),
        (nn.CELU(), [-1.0, 3.0], [1 / math.e - 1, 3.0]),
        (lambda x: functional.elu(x, -2.0), [-1.0, 1.0], [0.0, 1 - 2 * (math.e - 1)]),
        (nn.ELU(), [-1.0, 100.0], [1 / math.e - 1, 100.0]),
        (nn.Softplus(beta=-1), [1.0, -1.0], [0.686738, -0.313262]),
        (nn.Softplus(), [1.0], [1.313262]),
        (nn.Hardshrink(-1), [0.5, -2.0], [0.0, -2.0]),
        (nn.Hardshrink(1), [0.5, -2.0], [0.0, -2.0]),
        (nn.Mish(), [-20.0, 1.0], [0.0, 0.865098]),
        (nn.LogSigmoid(), [-3.0, -110.0, 20.0], [-3.048587, -INF, 0.0]),
        (nn.LogSigmoid(), [2.0], [-0.126928]),
    ],
)
def test_a_device_computes(function, x, expected):
    device = infer(function, torch.tensor(x))
    torch.testing.assert_close(device, torch.tensor(expected), equal_nan=True)


def test_the_logarithm_of_a_sigmoid_in_half_precision():
    x = torch.tensor([-12.0, -20.0, 9.0]).half()
    # sigmoid(-12) is a multiple of 2**-24, the nearest to 6.144e-6.
    expected = [math.log(103 * 2**-24), -INF, 0.0]
    device = infer(functional.logsigmoid, x)
    torch.testing.assert_close(device, torch.tensor(expected).half())


@pytest.mark.parametrize(
    ("function", "x", "slopes"),
    [
        (lambda x: functional.leaky_relu(x, -0.5), [-1.0, 0.0, 2.0], [1.0, 1.0, 1.0]),
        (
            lambda x: functional.rrelu(x, 0.5, 0.5, True),
            [-1.0, 0.0, 2.0],
            [0.5, 1.0, 1.0],
        ),
        (lambda x: functional.celu(x, 3.0), [2.0, -1.0], [1.0, 3 / math.e]),
        (lambda x: functional.celu_(x * 1, 3.0), [-1.0], [3 / math.e]),
        (functional.logsigmoid, [0.0, 20.0, -110.0], [0.5, 0.0, NAN]),
        (lambda x: functional.hardshrink(x, -1), [0.5, -2.0], [0.0, 1.0]),
        (lambda x: functional.softplus(x, -1), [0.0, 1.0], [0.5, 1 / (1 + math.e)]),
    ],
)
def test_a_gradient_on_a_device(function, x, slopes):
    x = torch.tensor(x)
    (gradient,) = gradients(lambda w: function(w).sum(), weights=[x])
    expected = torch.tensor(slopes)
    torch.testing.assert_close(gradient, expected, equal_nan=True, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("function", "is_reported"),
    [
        (lambda x: x.clamp(min=0).sqrt(), True),
        (lambda x: x.clamp(min=1e-6).sqrt(), False),
        (lambda x: (x.clamp(min=0) + 1e-6).sqrt(), False),
        (lambda x: functional.relu(x).log(), True),
        (lambda x: torch.where(x > 1, x, 0.0).rsqrt(), True),
        (lambda x: torch.where(x > 1, x, 1.0).rsqrt(), False),
        (lambda x: x.masked_fill(x > 1, 0.0).sqrt(), True),
        (lambda x: functional.relu(x).exp(), False),
        (lambda x: functional.leaky_relu(x, -0.5), True),
        (functional.leaky_relu, False),
        (functional.elu, True),
        (lambda x: functional.celu(x, 2.0), True),
        (functional.logsigmoid, True),
    ],
)
def test_what_a_check_says(function, is_reported):
    x = torch.ones(3)
    program = nn.Sequential(nn.Linear(3, 3), as_module(function))
    assert bool(reports(program, x, trains=True)) == is_reported
