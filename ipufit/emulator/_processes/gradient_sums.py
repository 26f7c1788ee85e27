# SPDX-License-Identifier: Apache-2.0
"""Add up gradients over processes, in as few messages as they have types."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from ipufit.emulator._processes.adding_up import Sum
from ipufit.emulator._processes.agreement import check_agreement
from ipufit.emulator._processes.processes import Processes
from ipufit.emulator.errors import createPoptorchError


class GradientSums:
    """Adds up the gradients of an update over processes.

    The first update decides which weights have gradients: a program always reaches the
    same ones. A message has them in the order of their names.

    Args:
        processes: The processes of this run.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._names: list[str] = []
        self._sorted: list[str] | None = None
        self._order: list[int] = []
        self._messages: list[_Message] = []

    def add_up(self, gradients: dict[str, Tensor | None], divisor: float = 1) -> None:
        """Replace gradients by their sums over the processes.

        The sums share memory that the next update uses again.

        Args:
            gradients: By name. Weights without one stay without.
            divisor: Divides the sums.

        Raises:
            Error: Other weights have gradients than in the first update, or another
                process has ended.
        """
        present = {n: value for n, value in gradients.items() if value is not None}
        names, values = list(present), list(present.values())
        if names != self._names or self._sorted is None:
            self._begin(names)
            self._messages = _messages(self._processes, self._order, values)
        for message in self._messages:
            message.fill(values)
            message.sum.run()
            if divisor != 1:
                message.joined.div_(float(divisor))
            message.read(values)
        gradients.update(zip(names, values))

    def _begin(self, names: list[str]) -> None:
        ordered = sorted(names)
        if self._sorted is None:
            facts = {"the weights that have gradients": ordered}
            check_agreement(self._processes, facts)
            self._sorted = ordered
        elif self._sorted != ordered:
            others = sorted(set(names) ^ set(self._sorted))
            raise createPoptorchError(
                "Several processes train, and some weights had a gradient in one "
                f"update but not in another: {', '.join(others)}. A stand-in for a "
                "custom operation must give the same inputs a gradient each time."
            )
        self._names = names
        self._order = sorted(range(len(names)), key=names.__getitem__)


class _Message:
    """The gradients of one type, joined in memory that all updates use.

    Args:
        processes: The processes of this run.
        members: Indices of the gradients, in their order in the message.
        values: All gradients of an update.
    """

    def __init__(
        self, processes: Processes, members: Sequence[int], values: Sequence[Tensor]
    ) -> None:
        self._members = members
        own = [values[index] for index in members]
        self.joined = torch.cat([value.reshape(-1) for value in own])
        self.sum = Sum(processes, self.joined)
        parts = torch.split(self.joined, [value.numel() for value in own])
        self._parts = [part.view(value.shape) for part, value in zip(parts, own)]

    def fill(self, values: Sequence[Tensor]) -> None:
        """Join the gradients of an update."""
        parts = [values[index].reshape(-1) for index in self._members]
        torch.cat(parts, out=self.joined)

    def read(self, values: list[Tensor]) -> None:
        """Put what the message holds in the place of gradients, or into them."""
        for index, part in zip(self._members, self._parts):
            if values[index].is_contiguous():
                values[index] = part
            else:
                values[index].copy_(part)


def _messages(
    processes: Processes, order: Sequence[int], values: Sequence[Tensor]
) -> list[_Message]:
    """Sort gradients by their types: one message for each."""
    members: dict[torch.dtype, list[int]] = {}
    for index in order:
        members.setdefault(values[index].dtype, []).append(index)
    return [_Message(processes, of_type, values) for of_type in members.values()]
