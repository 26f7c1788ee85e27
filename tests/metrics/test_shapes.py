# SPDX-License-Identifier: Apache-2.0
"""Outputs, targets and weights that fit each other, or don't."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit.errors import DataError
from ipufit.metrics.base import (
    class_indices,
    classified,
    dense_targets,
    elements,
    has_class_axis,
    is_binary,
    matched_targets,
    one_hot,
    total_marked,
)

SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@given(shape=SIZES, places=st.lists(st.integers(1, 4), max_size=2))
def test_axes_of_size_1_make_no_difference(shape, places):
    outputs = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    targets = outputs.clone()
    for place in places:
        targets = targets.unsqueeze(min(place, targets.dim()))
    assert torch.equal(matched_targets(outputs, targets), outputs)
    assert torch.equal(matched_targets(targets, outputs), targets)


@pytest.mark.parametrize(
    ("outputs", "targets"), [((2, 3), (3, 2)), ((1, 3), (3,)), ((4,), (4, 2))]
)
def test_other_shapes_are_refused(outputs, targets):
    with pytest.raises(DataError, match="a target for each output"):
        elements(torch.zeros(outputs), torch.zeros(targets), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int64])
def test_class_indices_become_integers(dtype):
    indices = class_indices(torch.zeros(2, 3), torch.tensor([[1], [0]]).to(dtype))
    assert indices.tolist() == [1, 0]
    assert not indices.is_floating_point()
    assert indices.dtype != torch.bool


def test_classes_are_moved_from_axis_1_to_the_last():
    outputs = torch.arange(24.0).reshape(2, 4, 3)
    scores, labels, weights = classified(outputs, torch.zeros(2, 3), torch.ones(2))
    assert torch.equal(scores, outputs.transpose(1, 2))
    assert labels.shape == weights.shape == (2, 3)


def test_of_two_fitting_axes_none_is_guessed():
    with pytest.raises(DataError, match="as many classes as positions"):
        class_indices(torch.zeros(2, 3, 3), torch.zeros(2, 3))


def test_another_index_may_be_left_out():
    labels, weights = classified(torch.eye(3), torch.tensor([0, 2, -100]), None, 2)[1:]
    assert weights.tolist() == [1.0, 0.0, 1.0]
    assert labels.tolist() == [0, 0, -100]


def test_probabilities_are_targets_with_a_class_axis():
    outputs, soft = torch.zeros(2, 3), torch.full((2, 3), 1 / 3).half()
    assert has_class_axis(outputs, soft)
    assert dense_targets(outputs, soft).dtype == torch.float32
    with pytest.raises(DataError, match="sparse_"):
        dense_targets(outputs, torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("shape", "expected"), [((4,), True), ((4, 1), True), ((4, 2), False)]
)
def test_one_output_per_sample_is_binary(shape, expected):
    assert is_binary(torch.zeros(shape)) is expected
    assert not has_class_axis(torch.zeros(4, 1), torch.zeros(4, 1))


@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=9))
def test_one_hot_is_torchs(labels):
    given = torch.tensor(labels)
    expected = torch.nn.functional.one_hot(given, 5)
    assert torch.equal(one_hot(given, 5).long(), expected)
    totals = total_marked(one_hot(given, 5), torch.full((len(labels), 1), 2.0))
    assert torch.equal(totals, expected.sum(0) * 2.0)
