# SPDX-License-Identifier: Apache-2.0
"""How the tensors of a batch nest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ipufit._tree import Structure
from ipufit.data import Known, Layout
from ipufit.data.layout import NOTHING
from tests.strategies import nestings


@given(nestings, st.none() | nestings, st.none() | nestings)
def test_parts_survive_flattening_and_splitting(inputs, targets, weights):
    layout = Layout.of((inputs, targets, weights))
    leaves = layout.flatten((inputs, targets, weights))
    assert len(leaves) == sum(part.num_leaves for part in layout.parts)
    found, known = layout.split(leaves)
    assert found == inputs
    assert known.targets == (() if targets is None else targets)
    assert known.weights == (weights if layout.has_weights else None)
    assert known.share is None


def test_missing_parts_are_nothing():
    layout = Layout.of((1,))
    assert (layout.targets, layout.weights) == (NOTHING, NOTHING)
    assert not layout.has_targets
    assert not layout.has_weights
    assert Layout.of((1, None, None)) == layout
    assert layout.flatten((5,)) == layout.flatten((5, None, None)) == [5]


def test_the_share_comes_last():
    layout = Layout.of((1, 2, 3)).padded()
    assert layout.known([1, 2, 3, "share"]) == Known(2, 3, "share")
    assert layout.split([1, 2, 3, "share"])[0] == 1
    assert layout != Layout.of((1, 2, 3))


def test_constants_are_no_leaves_but_make_a_difference():
    layout = Layout.of(({"a": 1, "mode": "x"}, 2))
    assert layout.num_inputs == 1
    assert layout.split([7, 8]) == ({"a": 7, "mode": "x"}, Known(8))
    assert layout != Layout.of(({"a": 1, "mode": "y"}, 2))
    assert layout.inputs == Structure.of({"a": 0, "mode": "x"})
