# SPDX-License-Identifier: Apache-2.0
"""Tells tensors apart by their storages, and knows the bytes of these on a device."""

from __future__ import annotations

from typing import Any, Iterable

import torch
from torch import Tensor


class Storages:
    """The storages of tensors, each with a key.

    They are held as long as this is, so that none is taken for another. A view has the
    key of what it views.

    Example:
        >>> storages, numbers = Storages(), torch.zeros(2, 3, dtype=torch.int64)
        >>> key = storages.key(numbers)
        >>> storages.key(numbers[0]) == key, storages.num_bytes([key])
        (True, 24)
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, int]] = {}  # with the bytes on a device

    def key(self, tensor: Tensor) -> int:
        """The key of a tensor's storage."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._held:
            count = storage.nbytes() // tensor.element_size()
            self._held[key] = storage, count * device_bytes(tensor.dtype)
        return key

    def keys(self, tensors: Iterable[Tensor]) -> dict[int, None]:
        """The keys of tensors, each once, in their order."""
        return dict.fromkeys(map(self.key, tensors))

    def num_bytes(self, keys: Iterable[int]) -> int:
        """Bytes of storages on a device, all together."""
        return sum(self._held[key][1] for key in keys)


def device_bytes(dtype: torch.dtype) -> int:
    """Bytes of a number on a device, which has none of 64 bits.

    Example:
        >>> device_bytes(torch.int64), device_bytes(torch.float16)
        (4, 2)
    """
    width: int = torch.empty((), dtype=dtype).element_size()
    return min(4, width)
