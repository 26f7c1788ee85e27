# SPDX-License-Identifier: Apache-2.0
"""Add up a tensor over processes in few steps.

In a step, processes wait for one another. gloo's `all_reduce` takes `2 * (P - 1)` steps
and sends `2 * (P - 1) / P` of the tensor, the least there is. Up to some megabytes the
steps take longer than the bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ipufit.emulator._processes.processes import Processes

_WHOLE_BYTES = 2**18  # of the tensors of all processes
_PARTED_BYTES = 2**21


def total_of(processes: Processes, tensor: Tensor) -> Tensor:
    """Add up a tensor over processes; the same bits in each.

    Args:
        processes: The processes of this run.
        tensor: 1-d, of one size and type in all of them. It may be written to.

    Returns:
        The sum; it may be the tensor itself.

    Raises:
        Error: Another process has ended, or didn't come in time.
    """
    size, count = tensor.numel() * tensor.element_size(), processes.count
    if size * count <= _WHOLE_BYTES or (count == 2 and size <= _PARTED_BYTES):
        return _exchanged_whole(processes, tensor)
    if size <= _PARTED_BYTES:
        return _exchanged_in_parts(processes, tensor)
    processes.add_up(tensor)
    return tensor


def _exchanged_whole(processes: Processes, tensor: Tensor) -> Tensor:
    """Send the tensor to all others, in one step; each process adds up all."""
    others, size = processes.count - 1, tensor.numel()
    sent = tensor if others == 1 else tensor.repeat(others)
    received = tensor.new_empty(others * size)
    sizes = [size] * processes.count
    sizes[processes.index] = 0
    processes.swap(received, sent, sizes, sizes)
    rows = list(received.view(others, size).unbind())
    rows.insert(processes.index, tensor)
    return _sum_in_order(rows)


def _exchanged_in_parts(processes: Processes, tensor: Tensor) -> Tensor:
    """Have each process add up its part of all tensors and send the sum to all.

    It takes two steps and sends as many bytes as `all_reduce`.
    """
    count = processes.count
    sizes = [len(part) for part in tensor.tensor_split(count)]
    own = [sizes[processes.index]] * count
    received = tensor.new_empty(sum(own))
    processes.swap(received, tensor, own, sizes)
    total = _sum_in_order(list(received.view(count, -1).unbind()))
    processes.swap(tensor, total.repeat(count), sizes, own)
    return tensor


def _sum_in_order(rows: list[Tensor]) -> Tensor:
    """Add up tensors in their order, so that all processes have the same bits."""
    total = torch.add(rows[0], rows[1])
    for row in rows[2:]:
        total += row
    return total
