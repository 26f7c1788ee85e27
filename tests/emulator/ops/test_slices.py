# SPDX-License-Identifier: Apache-2.0
"""Dynamic slices and points: the host as torch, the device of fixed size."""

import math

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


# x[a : a + n] with a tensor on the device -------------------------------------------

ROWS = torch.arange(48.0).reshape(8, 6)


def moved(function, start=2):
    model = poptorch.inferenceModel(Function(lambda _, x, a: function(x, a)))
    model.compile(ROWS, torch.tensor([start + 1]))  # values must not be baked in
    return model(ROWS, torch.tensor([start]))


STARTS_AND_STOPS = {
    "plus": lambda x, a: x[a : a + 4],
    "minus": lambda x, a: x[a - 2 : a + 2],
    "stepwise": lambda x, a: x[a + 3 - 4 : (a - 6).int() + 9],
    "a constant tensor": lambda x, a: x[a : a + torch.tensor([4])],
    "with a step": lambda x, a: x[a : a + 4 : 2],
    "another dimension": lambda x, a: x[:, a : a + 3],
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


def test_a_tensor_on_the_host_is_a_constant():
    start = torch.tensor([2])
    assert torch.equal(moved(lambda x, a: x[start : start + 5] + a * 0), ROWS[2:7])


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(-9, 9), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))
def test_it_wraps_for_any_start(start, size, step):
    places = [place % 8 for place in range(start, start + size, step)]
    result = moved(lambda x, a: x[a : a + size : step], start)
    assert torch.equal(result, ROWS[places])


# Farthest and nearest points, against plain loops -----------------------------------

POINTS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 0.0], [5.0, 4.0], [2.0, 2.0]])


def run(function, *inputs):
    model = poptorch.inferenceModel(Function(lambda _, *given: function(*given)))
    model.compile(*[torch.zeros_like(x) for x in inputs])
    return model(*inputs)


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.floats(0.1, 1.0),
    st.booleans(),
)
def test_each_sample_is_as_far_as_can_be(sizes, ratio, random_start):
    ptr = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    points = torch.rand(ptr[-1], 2)
    chosen = run(lambda x: poptorch.fps(x, ptr, ratio, random_start), points).tolist()
    for begin, end in zip(ptr, ptr[1:]):
        count = math.ceil((end - begin) * ratio)
        segment, chosen = chosen[:count], chosen[count:]
        assert len(set(segment)) == len(segment)
        assert all(begin <= index < end for index in segment)
        assert random_start or segment[0] == begin
        for n in range(1, count):
            gaps = torch.cdist(points[begin:end], points[segment[:n]]).min(dim=1).values
            assert gaps[segment[n] - begin] == pytest.approx(gaps.max().item())
    assert not chosen


def test_a_random_start_is_drawn_on_the_device():
    module = Function(lambda _, x: poptorch.fps(x, [0, 5], 0.1, True))
    model = poptorch.inferenceModel(module)
    assert len({model(POINTS).item() for _ in range(40)}) > 1


@pytest.mark.parametrize(
    "arguments",
    [
        (3, [0, 5]),
        (POINTS, (0, 5)),
        (POINTS, [0]),
        (POINTS, [0, 5], 1),
        (POINTS, [0, 5], 0.5, 1),
    ],
)
def test_fps_checks_its_arguments(arguments):
    with pytest.raises(poptorch.Error):
        poptorch.fps(*arguments)


@pytest.mark.parametrize(
    ("points", "ratio", "fragment"),
    [(POINTS[:, 0], 0.5, "2d Tensor"), (POINTS, 1.5, "range"), (POINTS, 0.0, "range")],
)
def test_fps_of_other_points_or_shares_is_refused(points, ratio, fragment):
    with pytest.raises(poptorch.Error, match=fragment):
        run(lambda x: poptorch.fps(x, [0, 5], ratio), points)


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(0, 99))
def test_the_nearest_point_of_the_batch_is_found(num_x, num_y, batches, seed):
    torch.manual_seed(seed)
    x, y = torch.rand(num_x * batches, 3), torch.rand(num_y * batches, 3)
    of_x = [batch for batch in range(batches) for _ in range(num_x)]
    of_y = [batch for batch in range(batches) for _ in range(num_y)]
    ids = torch.tensor(of_y)
    result = run(lambda x, y, ids: poptorch.nearest(x, y, of_x, ids), x, y, ids)
    for index, found in enumerate(result.tolist()):
        same = [j for j in range(len(y)) if of_y[j] == of_x[index]]
        assert found == min(same, key=lambda j: (x[index] - y[j]).norm().item())


def test_without_batches_all_are_in_one():
    x, y = torch.tensor([0.0, 9.0]), torch.tensor([8.0, 1.0])
    assert run(poptorch.nearest, x, y).tolist() == [1, 0]
    assert run(lambda x, y: poptorch.nearest(x, y, [0, 0]), x, y).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ((POINTS, 3), "torch.tensors of points"),
        ((POINTS, POINTS, 3), "must be a list or a tensor"),
        ((POINTS, POINTS[:, :1]), "same number of features"),
        ((POINTS[None], POINTS), "at most 2 dimensions"),
        ((POINTS, POINTS, [0, 0]), "one element per point"),
        ((POINTS, POINTS, [0, 0, 1, 0, 1], [0] * 5), "must be sorted"),
        ((POINTS, POINTS, [0] * 5, [0, 0, 0, 0, 1]), "same ids"),
    ],
)
def test_nearest_checks_its_arguments(arguments, fragment):
    def forward(points):
        given = [
            torch.zeros(a.shape) if isinstance(a, torch.Tensor) else a
            for a in arguments
        ]
        return poptorch.nearest(*given) + points.sum()

    with pytest.raises(poptorch.Error, match=fragment):
        run(forward, POINTS)


def test_the_host_has_neither():
    with pytest.raises(NotImplementedError, match="Could not run 'poptorch::fps'"):
        poptorch.fps(POINTS, [0, 5])
    with pytest.raises(NotImplementedError, match="Could not run 'poptorch::nearest'"):
        poptorch.nearest(POINTS, POINTS)
