# SPDX-License-Identifier: Apache-2.0
"""Which rows go to which micro-batch, and which results come back.

Dim 0 of every input is read as `[D, G, R, B]`: device iteration slowest, then
accumulation step, then replica, then sample. Outputs come back in the same order,
as many of them as the output mode asks for (PopTorch user guide, "Efficient data
batching"; PopART, `stepiosplitter.cpp`, `dataflow.hpp`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

import torch
from torch import Tensor

from ._tracing import device_tensor
from .enums import OutputMode


@dataclass(frozen=True)
class Layout:
    """The factors of one call.

    Attributes:
        device_iterations: D.
        gradient_accumulation: G.
        replicas: R.
        input_groups: Groups of replicas that receive rows of their own; R without
            `inputReplicaGrouping`.
        is_orthogonal: Whether group members stand apart (`r % groups`) instead of
            side by side.
    """

    device_iterations: int
    gradient_accumulation: int
    replicas: int
    input_groups: int
    is_orthogonal: bool = False

    @property
    def steps(self) -> int:
        """Micro-batches that one replica sees in a call."""
        return self.device_iterations * self.gradient_accumulation

    @property
    def input_blocks(self) -> int:
        """Micro-batches that one call's input is cut into."""
        return self.steps * self.input_groups

    def describe(self) -> str:
        """The factors, for error messages."""
        return (
            f"device iterations ({self.device_iterations}) * input groups "
            f"({self.input_groups}, of {self.replicas} replicas) * gradient "
            f"accumulation ({self.gradient_accumulation})"
        )

    def group(self, replica: int) -> int:
        """The input group of `replica`."""
        if self.is_orthogonal:
            return replica % self.input_groups
        return replica // (self.replicas // self.input_groups)

    def split(self, tensors: list[Tensor]) -> list[tuple[Tensor, ...]]:
        """Cut the input of a call into its micro-batches, in order."""
        if self.input_blocks == 1:
            return [tuple(device_tensor(tensor) for tensor in tensors)]
        cut = [
            torch.split(device_tensor(tensor), tensor.shape[0] // self.input_blocks)
            for tensor in tensors
        ]
        return list(zip(*cut)) if cut else [()] * self.input_blocks

    def micro_batches(
        self, blocks: list[tuple[Tensor, ...]], step: int
    ) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Each replica with its micro-batch of `step` (`d * G + g`)."""
        for replica in range(self.replicas):
            yield replica, blocks[step * self.input_groups + self.group(replica)]


class Outputs:
    """Collects the results of micro-batches as an output mode demands.

    Args:
        layout: The factors of the call.
        mode: Final, EveryN, All or Sum.
        period: N of EveryN.
        constants: Outputs, by index, that come back once, as they are.
    """

    def __init__(
        self,
        layout: Layout,
        mode: OutputMode,
        period: int,
        constants: dict[int, Tensor],
    ) -> None:
        self._layout = layout
        self._mode = mode
        self._period = period
        self._constants = constants
        self._kept: list[list[Tensor]] = []

    def add(self, step: int, replica: int, tensors: tuple[Tensor, ...]) -> None:
        """Take the results of one micro-batch, in the order they are made."""
        if self._mode is OutputMode.Sum:
            if step == 0:
                self._kept.append([tensor.detach().clone() for tensor in tensors])
            else:
                for total, tensor in zip(self._kept[replica], tensors):
                    total += tensor.detach()
        elif self._is_wanted(step):
            self._kept.append([tensor.detach() for tensor in tensors])

    def _is_wanted(self, step: int) -> bool:
        if self._mode is OutputMode.Final:
            return step == self._layout.steps - 1
        if self._mode is OutputMode.EveryN:
            # Counts micro-batches, not device iterations, once G > 1 (PopART,
            # `anchorreturntype_test.py`, against the words of its header).
            return (step + 1) % self._period == 0
        return True

    def tensors(self) -> list[Tensor]:
        """The results of the call: fresh tensors in 32 bits at most."""
        return [
            host_tensor(self._constants[index].clone())
            if index in self._constants
            else host_tensor(_join([kept[index] for kept in self._kept]))
            for index in range(len(self._kept[0]))
        ]


def host_tensor(tensor: Tensor) -> Tensor:
    """`tensor` in the type in which a device returns it.

    Example:
        >>> host_tensor(torch.tensor([1, 2])).dtype
        torch.int32
    """
    narrow = {torch.int64: torch.int32, torch.float64: torch.float32}
    return torch.as_tensor(tensor, dtype=narrow.get(tensor.dtype))


def _join(blocks: list[Tensor]) -> Tensor:
    if len(blocks) == 1:
        return torch.clone(blocks[0], memory_format=torch.contiguous_format)
    return torch.stack(blocks) if blocks[0].dim() == 0 else torch.cat(blocks)
