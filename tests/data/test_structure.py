# SPDX-License-Identifier: Apache-2.0
"""How the tensors of a batch nest."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ipufit._tree import Structure
from ipufit.data import Labels, SampleStructure
from ipufit.data.structure import NOTHING
from tests.strategies import nestings


@given(nestings, st.none() | nestings, st.none() | nestings)
def test_parts_survive_flattening_and_splitting(inputs, targets, weights):
    structure = SampleStructure.of((inputs, targets, weights))
    leaves = structure.flatten((inputs, targets, weights))
    assert len(leaves) == sum(part.num_leaves for part in structure.parts)
    found, known = structure.split(leaves)
    assert found == inputs
    assert known.targets == (() if targets is None else targets)
    assert known.weights == (weights if structure.has_weights else None)
    assert known.share is None


def test_missing_parts_are_nothing():
    structure = SampleStructure.of((1,))
    assert (structure.targets, structure.weights) == (NOTHING, NOTHING)
    assert not structure.has_targets
    assert not structure.has_weights
    assert SampleStructure.of((1, None, None)) == structure
    assert structure.flatten((5,)) == structure.flatten((5, None, None)) == [5]


def test_the_share_comes_last():
    structure = replace(SampleStructure.of((1, 2, 3)), is_padded=True)
    assert structure.labels([1, 2, 3, "share"]) == Labels(2, 3, "share")
    assert structure.split([1, 2, 3, "share"])[0] == 1
    assert structure != SampleStructure.of((1, 2, 3))


def test_constants_are_no_leaves_but_make_a_difference():
    structure = SampleStructure.of(({"a": 1, "mode": "x"}, 2))
    assert structure.num_inputs == 1
    assert structure.split([7, 8]) == ({"a": 7, "mode": "x"}, Labels(8))
    assert structure != SampleStructure.of(({"a": 1, "mode": "y"}, 2))
    assert structure.inputs == Structure.of({"a": 0, "mode": "x"})
