# SPDX-License-Identifier: Apache-2.0
"""Dynamic slices: on the host as in torch, on the device of fixed size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ipufit.emulator as poptorch
from tests.emulator._models import Function
from tests.strategies import examples

X = torch.arange(24.0).reshape(8, 3)


def at(start, dtype=torch.int32):
    return torch.tensor([start], dtype=dtype)


def on_device(function, *inputs):
    model = poptorch.inferenceModel(Function(lambda _, *given: function(*given)))
    shifted = [x + 5 if not x.is_floating_point() else x for x in inputs]
    model.compile(*shifted)  # values must not be baked in
    return model(*inputs)


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 7), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.booleans())
def test_a_slice_is_that_of_torch_and_wraps_on_the_device(start, size, step, is_last):
    x, dim = (X.T, -1) if is_last else (X, 0)
    host = poptorch.dynamic_slice(x, dim, at(start), size, step)
    stop = start + size
    expected = x[..., start:stop:step] if is_last else x[start:stop:step]
    assert torch.equal(host, expected)
    result = on_device(
        lambda x, s: poptorch.dynamic_slice(x, dim, s, size, step),
        x.contiguous(),
        at(start),
    )
    places = torch.tensor([place % 8 for place in range(start, stop, step)])
    assert torch.equal(result, x.index_select(dim, places))


@pytest.mark.parametrize(
    ("size", "step", "fragment"),
    [
        (0, 1, "The start and end of a slice must be different"),
        (-2, 1, "end less than the start is not supported"),
        (7, 1, r"size of the slice \(7\) must be a factor.*dimension \(8\)"),
        (4, 0, "Slicing step must be at least 1"),
    ],
)
def test_the_device_refuses_sizes(size, step, fragment):
    with pytest.raises(poptorch.Error, match=fragment):
        on_device(lambda x, s: poptorch.dynamic_slice(x, 0, s, size, step), X, at(1))


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ((3, 0, at(0), 1, 1), "dynamic_slice must take a torch.tensor input"),
        ((X, 0.0, at(0), 1, 1), "Dimension must be an integer"),
        ((X, 0, 0, 1, 1), "Slice start argument to dynamic_slice must be a torch"),
        ((X, 0, at(0), 1.0, 1), "Size must be an integer"),
        ((X, 0, at(0), 1, None), "Step must be an integer"),
        ((X, 0, at(0, torch.float32), 1, 1), "Expected integer typed start tensor"),
    ],
)
def test_a_slice_checks_its_arguments(arguments, fragment):
    with pytest.raises(poptorch.Error, match=fragment):
        poptorch.dynamic_slice(*arguments)


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 7), st.integers(1, 8), st.sampled_from([0, 1]))
def test_an_update_is_that_of_torch_within_the_dimension(start, size, dim):
    x = X if dim == 0 else X.T
    size = min(size, 8 - start)
    src = torch.full((size, 3) if dim == 0 else (3, size), -1.0)
    expected = torch.slice_scatter(x, src, dim, start, start + size)
    assert torch.equal(poptorch.dynamic_update(x, src, dim, at(start), size), expected)
    result = on_device(
        lambda x, src, s: poptorch.dynamic_update(x, src, dim, s, size),
        x.contiguous(),
        src,
        at(start),
    )
    assert torch.equal(result, expected)
    assert not x.lt(0).any()


def test_an_update_needs_a_size_and_the_same_dimensions_and_type():
    update = poptorch.dynamic_update
    with pytest.raises(poptorch.Error, match=r"dimensionality. \(2\) vs \(1\)"):
        update(X, X[0], 0, at(0), 1)
    with pytest.raises(poptorch.Error, match=r"\(torch.float32 vs torch.int64\)"):
        update(X, X.long(), 0, at(0), 8)
    # In a trace types are those of the device.
    with pytest.raises(poptorch.Error, match=r"\(torch.float32 vs torch.int32\)"):
        on_device(lambda x, i: update(x, x.long(), 0, i, 8), X, at(0))
    for size, message in ((0, "different"), (-1, "less than")):
        with pytest.raises(poptorch.Error, match=message):
            on_device(lambda x, i, n=size: update(x, x[:1], 0, i, n), X, at(2))


def test_gradients_pass():
    x = X.clone().requires_grad_()
    poptorch.dynamic_slice(x, 0, at(1), 2, 1).sum().backward()
    assert x.grad.sum() == 6


# x[a : a + n] with a tensor on the device -------------------------------------------

ROWS = torch.arange(48.0).reshape(8, 6)


def moved(function, start=2):
    model = poptorch.inferenceModel(Function(lambda _, x, a: function(x, a)))
    model.compile(ROWS, torch.tensor([start + 1]))  # values must not be baked in
    return model(ROWS, torch.tensor([start]))


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
    expected = STARTS_AND_STOPS[name](ROWS, torch.tensor([2]))
    assert torch.equal(moved(STARTS_AND_STOPS[name]), expected)


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
        moved(function)


@pytest.mark.parametrize("stop", [lambda a: a, lambda a: 2 * a])
def test_assignments_are_held_to_the_same_sizes(stop):
    def function(x, a):
        y = x * 1
        y[a : stop(a)] = 0.0
        return y

    with pytest.raises(poptorch.Error, match="slice"):
        moved(function)


def test_a_tensor_on_the_host_is_a_constant():
    start = torch.tensor([2])
    assert torch.equal(moved(lambda x, a: x[start : start + 5] + a * 0), ROWS[2:7])


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(-9, 9), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))
def test_it_wraps_for_any_start(start, size, step):
    places = [place % 8 for place in range(start, start + size, step)]
    result = moved(lambda x, a: x[a : a + size : step], start)
    assert torch.equal(result, ROWS[places])
