# SPDX-License-Identifier: Apache-2.0
"""Samples that count by their class."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit import DataError
from ipufit.data import SampleStructure
from ipufit.data.mixing import ClassWeights

PAIR = SampleStructure.of((0, 0))
X = torch.zeros(4, 2)


@given(
    st.dictionaries(st.integers(0, 4), st.floats(0, 9), min_size=1),
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
)
def test_each_row_has_the_weight_of_its_class_and_others_one(table, classes):
    weights = ClassWeights(table, PAIR)
    targets = torch.tensor(classes)
    x = torch.zeros(len(classes), 2)
    expected = torch.tensor([table.get(index, 1.0) for index in classes])
    one_hot = torch.nn.functional.one_hot(targets, 5)
    for form in (targets, targets[:, None], targets.int(), one_hot, one_hot.float()):
        assert torch.equal(weights.of([x, form]), expected)
    assert weights.of([x, targets]).dtype == torch.float32


def test_soft_targets_count_as_their_likeliest_class():
    targets = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    assert ClassWeights({1: 3}, PAIR).of([X[:2], targets]).tolist() == [1.0, 3.0]


def test_positions_have_weights_of_their_own():
    targets = torch.eye(2)[torch.tensor([[0, 1, 1], [1, 0, 0]])]
    assert ClassWeights({1: 3}, PAIR).of([X[:2], targets]).tolist() == [
        [1.0, 3.0, 3.0],
        [3.0, 1.0, 1.0],
    ]


def test_indices_of_positions_are_not_taken_for_one_hot():
    targets = torch.tensor([[0, 2, 1], [1, 2, 0]])
    with pytest.raises(DataError, match=r"\(2, 3\) don't add up to 1"):
        ClassWeights({1: 3}, PAIR).of([X[:2], targets])


def test_the_weights_are_part_of_the_layout():
    structure = ClassWeights({1: 3}, PAIR).structure
    assert structure.has_weights
    assert not PAIR.has_weights


@pytest.mark.parametrize(
    "structure", [SampleStructure.of((0,)), SampleStructure.of((0, (0, 0)))]
)
def test_one_target_is_needed(structure):
    with pytest.raises(DataError, match="needs one target"):
        ClassWeights({1: 3}, structure)


def test_sample_weights_exclude_class_weights():
    with pytest.raises(DataError, match="multiply them"):
        ClassWeights({1: 3}, SampleStructure.of((0, 0, 0)))


@pytest.mark.parametrize(
    "table",
    [3, [1], {}, {"a": 1}, {1.0: 1}, {True: 1}, {1: "a"}, {1: -1}, {1: float("inf")}],
)
def test_what_is_no_table_of_weights_is_refused(table):
    with pytest.raises(DataError, match="class_weight"):
        ClassWeights(table, PAIR)
