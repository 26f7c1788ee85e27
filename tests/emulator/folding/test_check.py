# SPDX-License-Identifier: Apache-2.0
"""When two lists of tensors count as the same."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit.emulator._folding import check as _check
from ipufit.emulator._folding.check import RELATIVE, SHARE_OF_LARGEST, difference


@given(st.floats(1e-20, 1e20), st.floats(0, 0.9))
def test_rounding_is_allowed_whatever_the_size(size, share):
    tensor = torch.tensor([size, size / 3, 0.0])
    assert difference([tensor], [tensor * (1 + share * RELATIVE)]) is None


@given(st.floats(1e-20, 1e20), st.floats(1.5, 100))
def test_more_is_not(size, times):
    tensor = torch.tensor([size, size / 3, 0.0])
    changed = tensor.clone()
    changed[2] = size * RELATIVE * times
    assert "differs" in difference([tensor], [changed])


def test_what_is_noise_beside_other_tensors_is_allowed():
    large, noise = torch.ones(2), torch.tensor([1e-7, -1e-7])
    assert difference([large, noise], [large, -noise]) is None
    assert difference([noise], [-noise]) is not None
    assert difference([large, noise], [large, noise + 2 * SHARE_OF_LARGEST])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_must_be_the_same(value):
    tensor = torch.tensor([1.0, value])
    assert difference([tensor], [tensor.clone()]) is None
    assert difference([tensor], [torch.tensor([1.0, 2.0])])
    assert difference([torch.tensor([1.0, 2.0])], [tensor])


def test_whole_numbers_are_equal_or_not():
    assert difference([torch.tensor([10**9])], [torch.tensor([10**9])]) is None
    assert difference([torch.tensor([10**9])], [torch.tensor([10**9 + 1])])
    assert difference([torch.tensor([True])], [torch.tensor([False])])


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(2, 1),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, dtype=torch.int32),
    ],
)
def test_shapes_and_types_count(other):
    assert "tensor 0 is (2,)" in difference([torch.ones(2)], [other])


def test_so_does_the_number_of_tensors():
    assert difference([], [torch.ones(1)]) == "there are 0 and 1 tensors"
    assert difference([], []) is None
    assert difference([torch.ones(0)], [torch.ones(0)]) is None


@pytest.mark.parametrize("place", [0, 5, 6])
@pytest.mark.parametrize("value", [2.0, math.nan])
def test_long_tensors_are_compared_piece_by_piece(monkeypatch, place, value):
    monkeypatch.setattr(_check, "_LONGEST_PIECE", 3)
    left = torch.ones(1, 7)
    right = left.clone()
    assert difference([left], [right]) is None
    right[0, place] = value
    assert difference([left], [right]).startswith("tensor 0 differs by")
    assert difference([right], [left]).startswith("tensor 0 differs by")
    assert difference([right], [right.clone()]) is None
