# SPDX-License-Identifier: Apache-2.0
"""A ring buffer: slots of tensors in memory that two processes share."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from typing import Any, NamedTuple, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: a cache line


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor in a slot."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the elements in bytes."""
        element_size: int = torch.empty((), dtype=self.dtype).element_size()
        return self.num_elements * element_size


class RingBuffer:
    """A fixed number of slots, each a list of tensors on shared memory.

    The memory is a file without a name: there is nothing to clean up, it is gone
    with the last process or tensor that uses it.

    Args:
        file_descriptor: The shared file; may be closed afterwards.
        specs: Shapes and dtypes of the tensors in one slot.
        num_slots: Number of slots.

    Attributes:
        slots: The tensors of each slot.

    Example:
        >>> specs = [TensorSpec((2,), torch.float32)]
        >>> descriptor = shared_file(specs, num_slots=3)
        >>> writer = RingBuffer(descriptor, specs, 3)
        >>> reader = RingBuffer(descriptor, specs, 3)
        >>> os.close(descriptor)
        >>> _ = writer.slots[1][0].fill_(7.0)
        >>> reader.slots[1]
        [tensor([7., 7.])]
    """

    def __init__(
        self, file_descriptor: int, specs: Sequence[TensorSpec], num_slots: int
    ) -> None:
        # The tensors keep the mapping alive.
        memory = mmap.mmap(file_descriptor, _file_size(specs, num_slots))
        self.slots: list[list[Tensor]] = []
        offset = 0
        for _ in range(num_slots):
            slot = []
            for spec in specs:
                slot.append(_view(memory, spec, offset))
                offset += _aligned(spec.num_bytes)
            self.slots.append(slot)


def shared_file(specs: Sequence[TensorSpec], num_slots: int) -> int:
    """Make the file behind a ring buffer.

    Returns:
        A file descriptor; the caller closes it.

    Example:
        >>> descriptor = shared_file([TensorSpec((2,), torch.float32)], num_slots=3)
        >>> os.close(descriptor)
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("poptorch_ring_buffer")
    else:  # not Linux
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, _file_size(specs, num_slots))
    return descriptor


def _file_size(specs: Sequence[TensorSpec], num_slots: int) -> int:
    slot_size = sum(_aligned(spec.num_bytes) for spec in specs)
    return max(1, num_slots * slot_size)  # an empty file can't be mapped


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _view(memory: Any, spec: TensorSpec, offset: int) -> Tensor:
    if spec.num_elements == 0:  # frombuffer refuses to see nothing
        return torch.empty(spec.shape, dtype=spec.dtype)
    flat = torch.frombuffer(
        memory, dtype=spec.dtype, count=spec.num_elements, offset=offset
    )
    view: Tensor = flat.view(spec.shape)
    return view
