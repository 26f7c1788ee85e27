# SPDX-License-Identifier: Apache-2.0
"""Farthest and nearest points, against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ipufit.emulator as poptorch
from tests.emulator._models import Function
from tests.strategies import examples

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
