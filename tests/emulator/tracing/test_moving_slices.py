# SPDX-License-Identifier: Apache-2.0
"""`x[a : a + n]` with a tensor `a` on the device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ipufit.emulator as poptorch
from tests.emulator._models import Function
from tests.strategies import examples

X = torch.arange(48.0).reshape(8, 6)


def on_device(function, start=2):
    model = poptorch.inferenceModel(Function(lambda _, x, a: function(x, a)))
    model.compile(X, torch.tensor([start + 1]))  # values must not be baked in
    return model(X, torch.tensor([start]))


STARTS_AND_STOPS = {
    "plus": lambda x, a: x[a : a + 4],
    "minus": lambda x, a: x[a - 2 : a + 2],
    "the other way round": lambda x, a: x[a : 4 + a],
    "stepwise": lambda x, a: x[a + 3 - 4 : (a - 6).int() + 9],
    "cast": lambda x, a: x[a.int() : a.long() + 2],
    "a constant tensor": lambda x, a: x[a : a + torch.tensor([4])],
    "with a step": lambda x, a: x[a : a + 4 : 2],
    "another dimension": lambda x, a: x[:, a : a + 3],
    "after others": lambda x, a: x[None, 1, ..., a : a + 2],
    "two": lambda x, a: x[a : a + 2, a + 1 : a + 3],
    "with a list": lambda x, a: x[a : a + 4, [0, 2]],
}


@pytest.mark.parametrize("name", STARTS_AND_STOPS)
def test_it_is_torchs_slice_within_the_dimension(name):
    expected = STARTS_AND_STOPS[name](X, torch.tensor([2]))
    assert torch.equal(on_device(STARTS_AND_STOPS[name]), expected)


@pytest.mark.parametrize(
    ("function", "fragment"),
    [
        (lambda x, a: x[a : a + 7], r"slice \(7\) must be a factor.*dimension \(8\)"),
        (lambda x, a: x[a:], "size of the sliced tensor must be a constant"),
        (lambda x, a: x[:a], "size of the sliced tensor must be a constant"),
        (lambda x, a: x[a : 2 * a], "size of the sliced tensor must be a constant"),
        (lambda x, a: x[a : x.sum().int()], "sliced tensor must be a constant"),
    ],
)
def test_other_sizes_are_refused(function, fragment):
    with pytest.raises(poptorch.Error, match=fragment):
        on_device(function)


@pytest.mark.parametrize("stop", [lambda a: a, lambda a: 2 * a])
def test_assignments_are_held_to_the_same_sizes(stop):
    def function(x, a):
        y = x * 1
        y[a : stop(a)] = 0.0
        return y

    with pytest.raises(poptorch.Error, match="slice"):
        on_device(function)


def test_a_tensor_on_the_host_is_a_constant():
    start = torch.tensor([2])
    assert torch.equal(on_device(lambda x, a: x[start : start + 5] + a * 0), X[2:7])


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(-9, 9), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))
def test_it_wraps_for_any_start(start, size, step):
    places = [place % 8 for place in range(start, start + size, step)]
    result = on_device(lambda x, a: x[a : a + size : step], start)
    assert torch.equal(result, X[places])
