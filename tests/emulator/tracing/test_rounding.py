# SPDX-License-Identifier: Apache-2.0
"""Rounding to float16: to which neighbours, how often, and what isn't rounded."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ipufit.emulator as poptorch
from ipufit.emulator._tracing import half as _rounding
from ipufit.emulator._tracing.half import (
    in_float32,
    round_at_random,
    rounding,
    small_gradients_last,
    to_float,
    to_half,
)
from ipufit.emulator._tracing.operation import Operation
from tests.strategies import examples

HALF = torch.float16
MANY = 100_000  # more than one table of words


def all_halves():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(HALF)


def neighbours(value):
    """The float16 numbers around a float32 one; equal if it is one itself."""
    number = torch.tensor(value).item()  # as float32
    halves = all_halves().double()
    halves = halves[halves.isfinite()]
    return (
        halves[halves <= number].max().item(),
        halves[halves >= number].min().item(),
    )


# Values -------------------------------------------------------------------------------


def test_what_float16_holds_stays_as_it_is():
    halves = all_halves()
    is_number = ~halves.isnan()
    for _ in range(20):
        rounded = round_at_random(halves.float())
        assert torch.equal(rounded[is_number].float(), halves[is_number].float())
        assert rounded[~is_number].isnan().all()


def test_zeros_get_no_sign():
    assert not torch.signbit(round_at_random(torch.zeros(1000)).float()).any()


SPREAD = [1.0001, -3.00037, 2047.3, -60001.0, 0.33333]
SMALL = [2.0**-14 * 1.3001, 5e-5, -(2.0**-15) * 1.0003, -3e-7, 1e-8, 2.0**-25, 1e-10]


@pytest.mark.parametrize("value", SPREAD + SMALL)
def test_the_upper_neighbour_comes_as_often_as_it_is_near(value):
    torch.manual_seed(0)
    low, high = neighbours(value)
    rounded = round_at_random(torch.full((MANY,), value)).double()
    assert bool(((rounded == low) | (rounded == high)).all())
    share = (torch.tensor(value).item() - low) / (high - low)
    ups = (rounded == high).sum().item()
    assert abs(ups - share * MANY) <= 5 * math.sqrt(MANY * share * (1 - share)) + 40


@given(st.floats(-65504, 65504, width=32), st.integers(0, 2**32))
@settings(max_examples=examples(60), deadline=None)
def test_a_neighbour_comes_out(value, seed):
    torch.manual_seed(seed)
    low, high = neighbours(value)
    rounded = round_at_random(torch.full((40,), value)).double()
    assert bool(((rounded == low) | (rounded == high)).all())


@pytest.mark.parametrize("count", [5000, 20_000, MANY])
@pytest.mark.parametrize("value", [1.0 + 0.3 * 2.0**-10, 5.3 * 2.0**-24])
def test_means_spread_as_those_of_independent_roundings(count, value):
    torch.manual_seed(1)
    low, high = neighbours(value)
    share = (torch.tensor(value).item() - low) / (high - low)
    x = torch.full((count,), value)
    times = 150
    shares = torch.tensor(
        [
            (round_at_random(x).double().mean().item() - low) / (high - low)
            for _ in range(times)
        ]
    )
    expected = math.sqrt(share * (1 - share) / count)
    assert abs(shares.mean().item() - share) < 5 * expected / math.sqrt(times) + 2e-4
    assert shares.std().item() == pytest.approx(expected, rel=0.3)


def test_values_near_the_largest_may_become_infinite():
    torch.manual_seed(0)
    rounded = round_at_random(torch.full((4000,), -65520.0)).float()
    assert set(rounded.tolist()) == {-65504.0, -math.inf}
    assert 1700 < rounded.isinf().sum() < 2300
    assert round_at_random(torch.tensor([65536.0, 1e30])).isinf().all()


@given(st.lists(st.floats(width=32), min_size=1, max_size=30))
def test_rounding_to_the_nearest_is_that_of_torch(values):
    x = torch.tensor(values)
    torch.testing.assert_close(to_half(x), x.half(), rtol=0, atol=0, equal_nan=True)


# Tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 7, 8192, 8193, 65536, 65537, 150_001])
def test_every_element_is_rounded(count):
    x = torch.linspace(-3, 3, count)
    rounded = round_at_random(x)
    assert rounded.shape == x.shape
    assert bool(((rounded.float() - x).abs() < 2.0**-9).all())


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(1.0001),
        torch.randn(5, 3).t(),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(6, 4)[:, ::2],
        torch.randn(3, 1).expand(3, 4),
        torch.randn(20)[3:],
    ],
)
def test_layouts_are_kept_and_what_is_given_too(x):
    before = x.clone()
    rounded = round_at_random(x)
    assert torch.equal(x, before)
    assert rounded.stride() == torch.empty_like(x).stride()
    torch.testing.assert_close(rounded.float(), x, rtol=1e-3, atol=1e-6)


def test_gradients_are_rounded_where_they_become_float16():
    torch.manual_seed(0)
    x = torch.ones(4000, dtype=HALF, requires_grad=True)
    with rounding(is_stochastic=True):
        y = to_half(to_float(x) * 1.0001)
        y.backward(torch.full_like(y, 2.0))
    assert set(x.grad.tolist()) == {2.0, 2.001953125}
    assert 2.0 < x.grad.float().mean().item() < 2.001


def test_small_gradients_are_rounded_together():
    torch.manual_seed(0)
    sizes = (400, 3000, 2**14 + 1)  # the last one is rounded by itself
    weights = [torch.ones(size, dtype=HALF, requires_grad=True) for size in sizes]
    with rounding(is_stochastic=True), mock.patch.object(
        _rounding, "round_at_random", wraps=round_at_random
    ) as rounded:
        loss = torch.cat([to_float(weight) for weight in weights])
        with small_gradients_last():
            loss.backward(torch.full_like(loss, 1.0001))
    assert rounded.call_count == 2
    for weight in weights:
        assert set(weight.grad.tolist()) == {1.0, 1.0009765625}
        assert 1.0 < weight.grad.float().mean().item() < 1.0003


def test_small_gradients_of_one_weight_are_added_and_those_watched_do_not_wait():
    x = torch.ones(3, 4, dtype=HALF, requires_grad=True)
    y = torch.ones(3, 4, dtype=HALF, requires_grad=True)
    seen = []
    y.register_hook(seen.append)
    with rounding(is_stochastic=True), small_gradients_last():
        ((to_float(x) * 2 + to_float(x).t().t() * 3) * to_float(y)).sum().backward()
        assert torch.equal(seen[0], torch.full((3, 4), 5.0, dtype=HALF))
        assert x.grad is None
    assert torch.equal(x.grad, torch.full((3, 4), 5.0, dtype=HALF))


def test_random_numbers_repeat_with_the_seed_and_are_the_callers():
    x = torch.rand(MANY)
    torch.manual_seed(5)
    first, other = round_at_random(x), round_at_random(x)
    torch.manual_seed(5)
    assert torch.equal(round_at_random(x), first)
    assert not torch.equal(first, other)


# What isn't rounded -------------------------------------------------------------------


def results_and_roundings(function, *given):
    """The result, the gradients, and the number of roundings at random."""
    operation = in_float32(Operation(function, function.__name__, given, {}))
    halves = [g for g in given if isinstance(g, torch.Tensor)]
    with rounding(is_stochastic=True), mock.patch.object(
        _rounding, "round_at_random", wraps=round_at_random
    ) as rounded:
        result = operation.run()
        result.backward(torch.ones_like(result))
        return result, [h.grad for h in halves], rounded.call_count


def half(*sizes):
    return torch.randn(*sizes).to(HALF).requires_grad_()


def dropout(x, p):
    return torch.nn.functional.dropout(x, p)


def max_pool2d(x, size, stride=None):
    return torch.nn.functional.max_pool2d(x, size, stride)


X = torch.randn(2, 3, 4, 4)

CALLS = {
    "relu": (torch.relu, lambda: [half(3, 4)], 0),
    "neg": (torch.neg, lambda: [half(3, 4)], 0),
    "windows apart": (max_pool2d, lambda: [half(2, 3, 4, 4), 2], 0),
    "windows that overlap": (max_pool2d, lambda: [half(2, 3, 4, 4), 2, 1], 1),
    "dropout of nothing": (dropout, lambda: [half(3, 4), 0.0], 0),
    "dropout": (dropout, lambda: [half(3, 4), 0.3], 2),
    "sum": (torch.add, lambda: [half(3, 4), half(3, 4)], 1),
    "sum with a row": (torch.add, lambda: [half(3, 4), half(4)], 3),
    "largest": (torch.maximum, lambda: [half(3, 4), half(3, 4)], 2),
    "product": (torch.mul, lambda: [half(3, 4), half(3, 4)], 3),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_needs_no_rounding_gets_none(what):
    torch.manual_seed(0)
    function, make, expected = CALLS[what]
    given = make()
    result, gradients, count = results_and_roundings(function, *given)
    assert count == expected
    assert result.dtype == HALF
    assert all(gradient.dtype == HALF for gradient in gradients)
    if what == "dropout":
        return
    doubles = [
        g.detach().double().requires_grad_() if isinstance(g, torch.Tensor) else g
        for g in given
    ]
    exact = function(*doubles)
    exact.backward(torch.ones_like(exact))
    torch.testing.assert_close(result.double(), exact, rtol=2e-3, atol=1e-5)
    for gradient, double in zip(gradients, doubles):
        torch.testing.assert_close(gradient.double(), double.grad, rtol=2e-3, atol=1e-5)


def test_numbers_that_float16_does_not_hold_are_rounded():
    limit = torch.tensor(1.0001)
    given = (torch.zeros(4000, dtype=HALF), limit)
    with rounding(is_stochastic=True):
        result = in_float32(Operation(torch.maximum, "maximum", given, {})).run()
    assert set(result.tolist()) == {1.0, 1.0009765625}


def test_a_tensor_given_twice_gets_the_sum_of_its_gradients():
    x = torch.ones(4000, dtype=HALF, requires_grad=True)
    operation = in_float32(Operation(torch.cat, "cat", ([x, x],), {}))
    with rounding(is_stochastic=True):
        result = operation.run()
        share = torch.full_like(result, 1.0)
        share[4000:] = 2.0**-12
        result.backward(share)
    assert set(x.grad.tolist()) == {1.0, 1.0009765625}


# Runs ---------------------------------------------------------------------------------


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 3).half()

    def forward(self, x):
        loss = (self.layer(x).float() ** 2).mean()
        return loss, poptorch.identity_loss(loss, reduction="none")


def trained(iterations):
    options = poptorch.Options().deviceIterations(iterations).randomSeed(7)
    options.Precision.enableStochasticRounding(True)
    model = Line()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01)
    executor = poptorch.trainingModel(model, options, optimizer)
    for rows in (
        torch.linspace(-1, 1, 24 * 8).reshape(24, 8).half().split(4 * iterations)
    ):
        executor(rows)
    executor.destroy()
    return model.layer.weight.detach().clone()


def test_runs_repeat_however_many_updates_a_call_makes():
    first = trained(1)
    assert torch.equal(trained(1), first)
    assert torch.equal(trained(6), first)
