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


class Sum:
    """Replaces a tensor by its sum over processes, as often as it is run.

    What is sent and received stays in memory: gloo's threads let go of a tensor some
    time after an exchange, and they must not be the last to have it.

    Args:
        processes: The processes of this run.
        tensor: 1-d, of one size and type in all of them.
    """

    def __init__(self, processes: Processes, tensor: Tensor) -> None:
        self._processes, self._tensor = processes, tensor
        count, size = processes.count, tensor.numel() * tensor.element_size()
        if size * count <= _WHOLE_BYTES or (count == 2 and size <= _PARTED_BYTES):
            self.run = self._exchange_whole
            others = count - 1
            self._received = tensor.new_empty(others, len(tensor))
            self._sent = tensor if others == 1 else tensor.repeat(others)
            sizes = [len(tensor)] * count
            sizes[processes.index] = 0
            self._sizes = self._own_sizes = sizes
        elif size <= _PARTED_BYTES:
            self.run = self._exchange_parts
            parts = tensor.tensor_split(count)
            self._own = parts[processes.index]
            self._received = tensor.new_empty(count, len(self._own))
            self._sent = self._own.repeat(count)
            self._sizes = [len(part) for part in parts]
            self._own_sizes = [len(self._own)] * count
        else:
            self.run = self._go_round

    def _exchange_whole(self) -> None:
        """Send the tensor to all others, in one step; each process adds up all."""
        tensor, sent, received = self._tensor, self._sent, self._received
        if sent is not tensor:
            sent.view(received.shape).copy_(tensor)
        self._processes.swap(received.view(-1), sent, self._sizes, self._sizes)
        rows = list(received.unbind())
        rows.insert(self._processes.index, tensor)
        _sum_in_order(rows, tensor)

    def _exchange_parts(self) -> None:
        """Have each process add up its part of all tensors and send the sum to all.

        It takes two steps and sends as many bytes as `all_reduce`.
        """
        swap, tensor, received = self._processes.swap, self._tensor, self._received
        swap(received.view(-1), tensor, self._own_sizes, self._sizes)
        _sum_in_order(list(received.unbind()), self._own)
        self._sent.view(received.shape).copy_(self._own)
        swap(tensor, self._sent, self._sizes, self._own_sizes)

    def _go_round(self) -> None:
        """Have gloo add up by its ring."""
        self._processes.add_up(self._tensor)


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
