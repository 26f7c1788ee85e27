# SPDX-License-Identifier: Apache-2.0
"""Add up gradients over processes, in as few messages as they have types."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from ipufit.emulator._processes.agreement import check_agreement
from ipufit.emulator._processes.processes import Processes
from ipufit.emulator.errors import createPoptorchError


class GradientSums:
    """Adds up the gradients of an update over processes.

    The first update decides which weights have gradients: a program always reaches the
    same ones.

    Args:
        processes: The processes of this run.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._names: list[str] | None = None
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
        names = [name for name, value in gradients.items() if value is not None]
        if names != self._names:
            self._begin(names)
        values = [value for value in gradients.values() if value is not None]
        gradients.update(zip(names, self.sums(values)))

    def sums(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Add up tensors, which are as many and of the same shapes in each update.

        Returns:
            The sums; contiguous ones share memory that the next update uses again, and
            others are the tensors themselves.
        """
        results = list(values)
        indices: dict[torch.dtype, list[int]] = {}
        for index, value in enumerate(values):
            indices.setdefault(value.dtype, []).append(index)
        for dtype, members in indices.items():
            parts = [values[index].reshape(-1) for index in members]
            joined = self._joined.get(dtype)
            if joined is None:
                joined = self._joined[dtype] = torch.cat(parts)
            else:
                torch.cat(parts, out=joined)
            self._processes.add_up(joined)
            split = joined.split([part.numel() for part in parts])
            for index, total in zip(members, split):
                value = values[index]
                if value.is_contiguous():
                    results[index] = total.view(value.shape)
                else:
                    value.copy_(total.view(value.shape))
        return results

    def _begin(self, names: list[str]) -> None:
        if self._names is not None:
            others = sorted(set(names) ^ set(self._names))
            raise createPoptorchError(
                "Several processes train, and some weights had a gradient in one "
                f"update but not in another: {', '.join(others)}. A stand-in for a "
                "custom operation must give the same inputs a gradient each time."
            )
        check_agreement(self._processes, {"the weights that have gradients": names})
        self._names = names
