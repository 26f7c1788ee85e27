# SPDX-License-Identifier: Apache-2.0
"""Nestings survive being flattened and rebuilt."""

from __future__ import annotations

import pytest
from hypothesis import given

from ipufit._tree import Structure, tree_map
from tests.strategies import Pair, leaves, nestings


@given(nestings)
def test_any_nesting_survives_flatten_and_rebuild(value):
    structure = Structure.of(value)
    flat = structure.flatten(value)
    rebuilt = structure.rebuild(flat)
    assert rebuilt == value
    assert type(rebuilt) is type(value)
    assert structure.num_leaves == len(flat)


@given(nestings)
def test_equal_nestings_have_equal_structures(value):
    other = tree_map(lambda leaf: leaf + 1, value)
    assert Structure.of(other) == Structure.of(value)
    assert hash(Structure.of(other)) == hash(Structure.of(value))


@given(leaves)
def test_a_leaf_is_its_own_nesting(leaf):
    assert Structure.of(leaf).flatten(leaf) == [leaf]


def test_a_namedtuple_stays_one():
    doubled = tree_map(lambda leaf: 2 * leaf, Pair(1, (2, 3)))
    assert doubled == Pair(2, (4, 6))
    assert type(doubled) is Pair


def test_a_dict_of_another_order_gives_its_leaves_in_the_order_of_the_first():
    structure = Structure.of({"a": 1, "b": 2})
    assert structure.flatten({"b": 20, "a": 10}) == [10, 20]


@pytest.mark.parametrize(
    ("value", "other", "message"),
    [
        ((1, 2), (1, 2, 3), "expected 2 elements"),
        ((1, 2), 7, "expected 2 elements"),
        ({"a": 1}, {"b": 1}, "dict with keys"),
        ({"a": 1}, [1], "dict with keys"),
    ],
)
def test_another_nesting_is_refused(value, other, message):
    with pytest.raises(TypeError, match=message):
        Structure.of(value).flatten(other)
