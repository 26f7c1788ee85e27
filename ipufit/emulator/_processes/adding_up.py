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


def add_up(processes: Processes, tensor: Tensor) -> None:
    """Replace a tensor by its sum over processes; the same bits in each.

    Args:
        processes: The processes of this run.
        tensor: 1-d, of one size and type in all of them.

    Raises:
        Error: Another process has ended, or didn't come in time.
    """
    size, count = tensor.numel() * tensor.element_size(), processes.count
    if size * count <= _WHOLE_BYTES or (count == 2 and size <= _PARTED_BYTES):
        _exchange_whole(processes, tensor)
    elif size <= _PARTED_BYTES:
        _exchange_parts(processes, tensor)
    else:
        processes.add_up(tensor)


def _exchange_whole(processes: Processes, tensor: Tensor) -> None:
    """Send the tensor to all others, in one step; each process adds up all."""
    others, size = processes.count - 1, tensor.numel()
    sent = tensor if others == 1 else tensor.repeat(others)
    received = tensor.new_empty(others * size)
    sizes = [size] * processes.count
    sizes[processes.index] = 0
    processes.swap(received, sent, sizes, sizes)
    rows = list(received.view(others, size).unbind())
    rows.insert(processes.index, tensor)
    _sum_in_order(rows, tensor)


def _exchange_parts(processes: Processes, tensor: Tensor) -> None:
    """Have each process add up its part of all tensors and send the sum to all.

    It takes two steps and sends as many bytes as `all_reduce`.
    """
    count = processes.count
    parts = tensor.tensor_split(count)
    own, sizes = parts[processes.index], [len(part) for part in parts]
    from_each = [len(own)] * count
    received = tensor.new_empty(count * len(own))
    processes.swap(received, tensor, from_each, sizes)
    _sum_in_order(list(received.view(count, -1).unbind()), own)
    processes.swap(tensor, own.repeat(count), sizes, from_each)


def _sum_in_order(rows: list[Tensor], out: Tensor) -> None:
    """Add up tensors in their order, so that all processes have the same bits.

    Args:
        rows: At least two; `out` may be one of them.
        out: Is written to at the end.
    """
    *before, last = rows
    total = before[0]
    for row in before[1:]:
        total = torch.add(total, row)
    torch.add(total, last, out=out)
