# SPDX-License-Identifier: Apache-2.0
"""Buffers of whole numbers that the host counts up on behalf of a device.

PopTorch compiles these buffers in as constants. Those that `forward` only counts up,
such as batch norm's `num_batches_tracked`, are counted here instead.
"""

from __future__ import annotations

from typing import Mapping, MutableMapping

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils.weak import WeakIdKeyDictionary

_COUNTED: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call,unused-ignore]


def is_counted(buffer: Tensor) -> bool:
    """Whether the host counts a buffer up, so that its value changes by itself.

    Example:
        >>> is_counted(torch.tensor(0))
        False
    """
    return buffer in _COUNTED


class Counters:
    """Counts up buffers of a module after each call of its program.

    Args:
        module: Module that has the buffers.
        increments: Number that each micro-batch adds, by the buffers' names.
        micro_batches: Micro-batches that one replica sees in a call.

    Example:
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> Counters(norm, {"num_batches_tracked": 1}, 8).count_call()
        >>> norm.num_batches_tracked
        tensor(8)
    """

    def __init__(
        self,
        module: torch.nn.Module,
        increments: Mapping[str, int],
        micro_batches: int,
    ) -> None:
        buffers = dict(module.named_buffers())
        self._increments = [
            (buffers[name], number * micro_batches)
            for name, number in increments.items()
        ]
        _COUNTED.update((buffer, True) for buffer, _ in self._increments)

    def count_call(self) -> None:
        """Count one call, without fetching the buffers from the device."""
        if self._increments:
            with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
                for buffer, number in self._increments:
                    Tensor.add_(buffer, number)
