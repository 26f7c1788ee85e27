# SPDX-License-Identifier: Apache-2.0
"""Frames give their numbers, and named columns become targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ipufit import DataError
from ipufit.data.structure import column_names, frame_values, is_frame, split_columns


def test_columns_are_named_by_words_alone():
    assert column_names("a") == ["a"]
    assert column_names(("a", "b")) == ["a", "b"]
    for data in (None, [], torch.zeros(2), ["a", 1], np.array(["a"]), {"a": 1}):
        assert column_names(data) is None


def test_one_column_is_the_target_itself_and_several_are_a_dict():
    row = {"a": 1, "b": 2, "c": 3}
    assert split_columns(row, ["b"], True, "`x`") == ({"a": 1, "c": 3}, 2)
    assert split_columns(row, ["b"], False, "`x`") == ({"a": 1, "c": 3}, {"b": 2})
    assert split_columns(row, ["c", "a"], False, "`x`") == ({"b": 2}, {"c": 3, "a": 1})


@pytest.mark.parametrize(
    ("row", "names", "message"),
    [
        ({"a": 1}, ["b"], "`x` has no column 'b'"),
        ({"a": 1}, ["a"], "none is left for inputs"),
        ((1, 2), ["a"], "it is a tuple"),
        (torch.zeros(2), ["a"], "it is a Tensor"),
    ],
)
def test_columns_that_are_not_there_are_refused(row, names, message):
    with pytest.raises(DataError, match=message):
        split_columns(row, names, True, "`x`")


def test_only_frames_are_frames():
    pandas = pytest.importorskip("pandas")
    assert is_frame(pandas.DataFrame({"a": [1]}))
    assert is_frame(pandas.Series([1]))
    for other in (np.zeros(2), torch.zeros(2), [1], {"a": 1}):
        assert not is_frame(other)


@pytest.mark.parametrize("dtype", ["Int64", "Float64", "boolean", object])
def test_columns_that_lack_values_are_named(dtype):
    pandas = pytest.importorskip("pandas")
    column = pandas.Series([True, True, None], dtype=dtype)
    frame = pandas.DataFrame({"a": [1.0, 2.0, 3.0], "b": column})
    with pytest.raises(DataError, match="`x` has NA in its column 'b' in row 2"):
        frame_values(frame, "`x`")
    with pytest.raises(DataError, match="`y` has NA in row 2"):
        frame_values(frame["b"], "`y`")
    if dtype is not object:
        assert frame_values(frame[:2], "`x`").tolist() == [[1, 1], [2, 1]]
