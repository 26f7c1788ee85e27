# SPDX-License-Identifier: Apache-2.0
"""Values become tensors of types that IPUs have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ipufit import DataError
from ipufit.data.structure import as_tensor


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1, torch.int64),
        (1.5, torch.float32),
        (True, torch.bool),
        (np.float64(1.5), torch.float32),
        (np.float16(1.5), torch.float16),
        (np.int32(3), torch.int32),
        (np.bool_(True), torch.bool),
        (np.zeros(2), torch.float32),
        (torch.zeros(2, dtype=torch.float64), torch.float32),
        (torch.zeros(2, dtype=torch.float16), torch.float16),
        (torch.zeros(2, dtype=torch.uint8), torch.uint8),
    ],
)
def test_every_number_has_a_type_that_ipus_have(value, dtype):
    tensor = as_tensor(value, "`x`")
    assert tensor.dtype == dtype
    assert np.array_equal(tensor.double().numpy(), np.asarray(value, dtype=float))


def test_what_needs_no_change_is_not_copied():
    tensor, array = torch.zeros(2), np.zeros(2, dtype=np.float32)
    assert as_tensor(tensor, "`x`") is tensor
    assert as_tensor(array, "`x`").data_ptr() == array.ctypes.data


def test_a_gradient_is_left_behind():
    assert not as_tensor(torch.zeros(2, requires_grad=True), "`x`").requires_grad


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("word", "`x` has a str, 'word'"),
        (None, "`x` has a NoneType"),
        (1j, "`x` has a complex"),
        (object(), "`x` has a object"),
        (np.array(["word"]), "which torch can't hold"),
        (np.array([1j]), "complex128"),
        (np.array(["2020-01-01"], dtype="M8[D]"), "datetime64"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "on meta"),
    ],
)
def test_what_an_ipu_cannot_take_is_refused(value, message):
    with pytest.raises(DataError, match=message):
        as_tensor(value, "`x`")


MASKED = np.ma.masked_array(np.arange(6.0).reshape(3, 2), mask=[[0, 0], [0, 1], [1, 0]])


@pytest.mark.parametrize("value", [MASKED, MASKED.astype(np.int64), MASKED[1]])
def test_a_masked_array_is_refused_with_the_way_out(value):
    match = r"masked array \(\d of \d values, the first at .*\), .* \.filled\(value\)"
    with pytest.raises(DataError, match=match):
        as_tensor(value, "`x`")
    assert as_tensor(value.filled(0), "`x`").shape == value.shape


def test_an_array_that_masks_nothing_is_one_like_others():
    value = np.ma.masked_array(np.arange(3.0), mask=[0, 0, 0])
    assert as_tensor(value, "`x`").tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("values", "place"),
    [
        (lambda pd: pd.NA, "`x` has <NA>, a missing"),
        (
            lambda pd: np.array([1, pd.NA], dtype=object),
            r"has <NA> at \[1\], a missing",
        ),
        (lambda pd: np.array([1, None], dtype=object), r"has None at \[1\], a missing"),
    ],
)
def test_missing_values_are_called_so(values, place):
    pandas = pytest.importorskip("pandas")
    with pytest.raises(DataError, match=f"{place} value.* fillna"):
        as_tensor(values(pandas), "`x`")
