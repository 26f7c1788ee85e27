# SPDX-License-Identifier: Apache-2.0
"""The types that tensors have on a device, and the types they come back in."""

from __future__ import annotations

import torch
from torch import Tensor

_COMES_BACK_AS = {torch.int64: torch.int32, torch.float64: torch.float32}


def device_tensor(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """Cast a tensor to a type that an IPU holds.

    64-bit integers keep their type, because torch's CPU kernels ask for it where
    an IPU takes 32 bits, but only the values of 32 bits; `float64` and `bfloat16`
    become `float32` (PopTorch, `PoplarExecutable.cpp`).

    Args:
        tensor: Tensor of any type.
        copy: If True, the result has memory of its own. If False, it is `tensor`
            itself where nothing changes.

    Example:
        >>> device_tensor(torch.tensor([2**32 + 7, -1]))
        tensor([ 7, -1])
        >>> device_tensor(torch.zeros(1, dtype=torch.float64)).dtype
        torch.float32
    """
    if tensor.dtype == torch.int64:
        return torch.as_tensor(tensor.to(torch.int32), dtype=torch.int64)
    if tensor.dtype in (torch.float64, torch.bfloat16):
        return torch.as_tensor(tensor, dtype=torch.float32)
    return torch.clone(tensor) if copy else tensor


def host_tensor(tensor: Tensor) -> Tensor:
    """Cast a tensor to the type that a device returns; other types stay as they are.

    Example:
        >>> host_tensor(torch.tensor([1, 2])).dtype
        torch.int32
    """
    dtype = _COMES_BACK_AS.get(tensor.dtype)
    return tensor if dtype is None else torch.as_tensor(tensor, dtype=dtype)
