# SPDX-License-Identifier: Apache-2.0
"""What types tensors have on the device, and come back in."""

from __future__ import annotations

import pytest
import torch

from ipufit.emulator._ground.dtypes import device_tensor, host_tensor

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16]
DTYPES += [torch.float32, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_of_32_bits_or_less_pass_through_without_a_copy(dtype):
    tensor = torch.ones(3, dtype=dtype)
    assert device_tensor(tensor) is tensor
    assert host_tensor(tensor) is tensor


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.float64])
def test_a_copy_has_its_own_memory(dtype):
    tensor = torch.zeros(3, dtype=dtype)
    device_tensor(tensor, copy=True).fill_(1)
    assert not tensor.any()


def test_integers_keep_32_bits_of_their_value():
    big = torch.tensor([2**31, -(2**31) - 1, 5, 2**40 + 3])
    assert device_tensor(big).tolist() == [-(2**31), 2**31 - 1, 5, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_floats_become_float32_on_the_device(dtype):
    third = device_tensor(torch.tensor([1.0], dtype=dtype) / 3)
    assert third.dtype == torch.float32


def test_64_bits_come_back_as_32():
    assert host_tensor(torch.tensor([7])).dtype == torch.int32
    assert host_tensor(torch.tensor([7.0], dtype=torch.float64)).dtype == torch.float32
