# SPDX-License-Identifier: Apache-2.0
"""Add up gradients over processes, in as few messages as they have types."""

from __future__ import annotations

from typing import Mapping, Sequence

import torch
from torch import Tensor

from ipufit.emulator._processes.adding_up import total_of
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
        self._joined: dict[torch.dtype, Tensor] = {}

    def add_up(self, gradients: dict[str, Tensor | None]) -> None:
        """Replace gradients by their sums over the processes.

        The sums share memory that the next update uses again.

        Args:
            gradients: By name. Weights without one stay without.

        Raises:
            Error: Other weights have gradients than in the first update, or another
                process has ended.
        """
        present = {n: value for n, value in gradients.items() if value is not None}
        gradients.update(zip(present, self._sums(present)))

    def add_up_in_place(self, gradients: Mapping[str, Tensor]) -> None:
        """Write sums over the processes into the gradients themselves.

        Args:
            gradients: By name.

        Raises:
            Error: As `add_up` does.
        """
        for tensor, total in zip(gradients.values(), self._sums(gradients)):
            if total is not tensor:
                tensor.copy_(total)

    def _sums(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Give the sums: contiguous ones in shared memory, others in the tensors."""
        names, values = list(gradients), list(gradients.values())
        if names != self._names or self._sorted is None:
            self._begin(names)
        indices: dict[torch.dtype, list[int]] = {}
        for index in self._order:
            indices.setdefault(values[index].dtype, []).append(index)
        for dtype, members in indices.items():
            joined = self._join(dtype, [values[index].reshape(-1) for index in members])
            added_up = total_of(self._processes, joined)
            totals = torch.split(added_up, [values[index].numel() for index in members])
            for index, total in zip(members, totals):
                value = values[index]
                if value.is_contiguous():
                    values[index] = total.view(value.shape)
                else:
                    value.copy_(total.view(value.shape))
        return values

    def _join(self, dtype: torch.dtype, parts: Sequence[Tensor]) -> Tensor:
        joined = self._joined.get(dtype)
        if joined is None:
            joined = self._joined[dtype] = torch.cat(list(parts))
        else:
            torch.cat(list(parts), out=joined)
        return joined

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
