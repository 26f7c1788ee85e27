# SPDX-License-Identifier: Apache-2.0
"""Variances and standard deviations as a device computes them."""

import pytest
import torch

from ipufit.emulator.errors import Error
from tests.emulator.operators._programs import gradients, infer, reports

X = torch.tensor([[1.0, 3.0], [2.0, 6.0]])


@pytest.mark.parametrize("function", [torch.var_mean, torch.std_mean])
def test_the_mean_beside_a_variance_loses_its_dimension(function):
    spread, mean = infer(lambda x: function(x, 1, keepdim=True), X)
    assert mean.tolist() == [2.0, 4.0]
    power = 1 if function is torch.var_mean else 0.5
    torch.testing.assert_close(spread, torch.tensor([[2.0], [8.0]]) ** power)
    assert "squeezed" in reports(lambda x: function(x, 1, keepdim=True)[1], X)[0]
    assert infer(lambda x: function(x)[1], X).tolist() == 3.0
    assert not reports(lambda x: function(x, 1)[1], X)
    with pytest.raises(Error, match="squeezed"):
        infer(lambda x: x - function(x, 1, keepdim=True)[1], torch.ones(2, 3))


def test_a_row_of_equal_numbers_has_no_finite_gradient_of_std():
    x = torch.tensor([[2.0, 2.0], [1.0, 3.0]])
    (gradient,) = gradients(lambda w: w.std(1).sum(), weights=[x])
    assert gradient[0].isnan().all()
    torch.testing.assert_close(gradient[1], torch.tensor([-(0.5**0.5), 0.5**0.5]))
    (gradient,) = gradients(lambda w: w.var(1).sum(), weights=[x])
    assert gradient.tolist() == [[0.0, 0.0], [-2.0, 2.0]]


SPREADS = [torch.var, torch.std, torch.var_mean, torch.std_mean]


@pytest.mark.parametrize("function", SPREADS)
@pytest.mark.parametrize(
    "settings", [{}, {"dim": 1}, {"dim": (0, -1), "correction": 0}, {"unbiased": False}]
)
def test_spreads_of_float16(function, settings):
    x = torch.randn(4, 30, generator=torch.Generator().manual_seed(0)) * 3
    device = infer(lambda x: function(x, **settings), x.half())
    expected = function(x, **settings)
    if isinstance(expected, torch.Tensor):
        device, expected = (device,), (expected,)
    for found, wanted in zip(device, expected):
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.float(), wanted, rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("function", SPREADS)
def test_sums_of_squares_overflow_in_float16(function):
    x = torch.tensor([100.0, -100.0] * 4).half()  # 8 squares of 10,000
    spread = infer(lambda x: function(x, unbiased=False), x)
    spread = spread if isinstance(spread, torch.Tensor) else spread[0]
    assert spread.isinf()
    assert not reports(function, x)  # it depends on the values
