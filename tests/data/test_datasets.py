# SPDX-License-Identifier: Apache-2.0
"""The user's samples, flattened and held to the first."""

from __future__ import annotations

from collections import OrderedDict, UserDict

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.utils.data import DataLoader

from ipufit import DataError
from ipufit.data.datasets import (
    ArrayDataset,
    FlatDataset,
    IterableRows,
    Parts,
    collate,
)
from ipufit.data.structure import SampleStructure
from tests.strategies import nestings


def flat(samples, parts_of=None):
    parts_of = parts_of or Parts()
    return FlatDataset(samples, parts_of, SampleStructure.of(parts_of(samples[0])), "x")


@given(nestings)
def test_any_nesting_is_flattened_and_found_again(inputs):
    dataset = flat([(inputs, 7)])
    structure = SampleStructure.of((inputs, 7))
    leaves = dataset[0]
    assert structure.inputs.rebuild(int(t) for t in leaves[:-1]) == inputs
    assert int(leaves[-1]) == 7


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ((torch.zeros(3), 1), r"Sample 1 of `x` has shape \(3,\).*different shapes"),
        ((torch.zeros(2), 1.5), "Sample 1 of `x` is of torch.float32 and sample 0 of"),
        (((torch.zeros(2),) * 2, 1), "Sample 1 of `x` has a tuple"),
        ((torch.zeros(2), "one"), "Sample 1 of `x` has a str, 'one'"),
        ((torch.zeros(2), 1, 1, 1), "have 4 parts"),
        ((torch.zeros(2),), "nests differently from sample 0"),
    ],
)
def test_a_sample_unlike_the_first_is_refused_by_its_index(odd, message):
    dataset = flat([(torch.zeros(2), 1), odd])
    dataset[0]
    with pytest.raises(DataError, match=message):
        dataset[1]


def test_a_constant_that_changes_is_named():
    dataset = flat([({"a": 1, "kind": "cat"}, 1), ({"a": 1, "kind": "dog"}, 1)])
    with pytest.raises(DataError, match=r"inputs\['kind'\] was 'cat' and is 'dog' now"):
        dataset[1]


def test_arrays_are_gathered_by_index():
    dataset = ArrayDataset([torch.arange(9), torch.arange(9) * 2])
    loader = DataLoader(dataset, 4, collate_fn=collate)
    assert [batch[1].tolist() for batch in loader] == [
        [0, 2, 4, 6],
        [8, 10, 12, 14],
        [16],
    ]
    assert [int(t) for t in dataset[3]] == [3, 6]
    assert len(dataset) == 9


def test_parts_are_taken_as_keras_takes_them():
    parts = Parts()
    for sample in ((1,), (1, 2), (1, 2, 3), [1, 2]):
        assert list(parts(sample)) == list(sample)
    for sample in (5, {"a": 1}, torch.zeros(2)):
        assert parts(sample)[0] is sample
        assert len(parts(sample)) == 1
    for sample in ((), (1,) * 4):
        with pytest.raises(DataError, match=f"have {len(sample)} parts"):
            parts(sample)


@pytest.mark.parametrize("kind", [dict, UserDict, OrderedDict])
def test_columns_are_taken_out_of_any_mapping(kind):
    parts = Parts(["b"], True)
    assert parts(kind(a=1, b=2)) == ({"a": 1}, 2)
    assert Parts()(kind(a=1)) == ({"a": 1},)


def test_lists_of_numbers_are_arrays_in_a_table_only():
    row = {"a": [1, 2], "b": [[0.5], [1.5]], "c": "word", "d": ["x"]}
    (inputs,) = Parts(has_lists=True)(row)
    assert np.array_equal(inputs["a"], [1, 2])
    assert inputs["b"].shape == (2, 1)
    assert inputs["c"] == "word"
    assert inputs["d"] == ["x"]
    assert Parts()(row) == (row,)


def test_inputs_may_be_all_that_counts():
    parts = Parts(inputs_only=True)
    assert tuple(parts((1, "target", "weight"))) == (1,)
    assert parts({"a": 1}) == ({"a": 1},)


def test_an_iterable_can_be_gone_through_again():
    rows = IterableRows([1, 2])
    assert list(rows) == list(rows) == [1, 2]
