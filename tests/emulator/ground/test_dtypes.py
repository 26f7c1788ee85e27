# SPDX-License-Identifier: Apache-2.0
"""What types tensors have on the device, and come back in."""

from __future__ import annotations

import pytest
import torch

import ipufit.emulator as poptorch
from tests.emulator._models import Function

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16]
DTYPES += [torch.float32, torch.bool]


def returned(tensor, forward=lambda _, x: x):
    return poptorch.inferenceModel(Function(forward))(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_of_32_bits_or_less_stay(dtype):
    tensor = torch.ones(3, dtype=dtype)
    result = returned(tensor)
    assert result.dtype == dtype
    assert torch.equal(result, tensor)


def test_integers_keep_32_bits_of_their_value():
    big = torch.tensor([2**31, -(2**31) - 1, 5, 2**40 + 3])
    result = returned(big)
    assert result.dtype == torch.int32
    assert result.tolist() == [-(2**31), 2**31 - 1, 5, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_floats_become_float32_on_the_device(dtype):
    one = torch.tensor([1.0], dtype=dtype)
    result = returned(one, lambda _, x: x / 3)
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(1 / 3, rel=1e-7)
