# SPDX-License-Identifier: Apache-2.0
"""The schedule of a pipeline: which micro-batch each stage works on, cycle by cycle.

A micro-batch goes through one slot after the other, one in each cycle. In inference the
slots are the stages. In training they are the forward stages and then the backward
ones, where the last forward stage and its backward are one slot: 2 * stages - 1 of them
(PopTorch's check of gradient accumulation, `CompilerImpl.cpp`). So the IPU of a stage
has two slots, but the last one's has one.

All slots are taken to need the same time. Where they don't, each cycle takes as long as
its slowest slot.
"""

from __future__ import annotations

from typing import NamedTuple


class PipelineSchedule(NamedTuple):
    """The cycles of one update, or of one call of inference.

    Attributes:
        stages: Forward stages, 1 or more.
        micro_batches: Micro-batches that go through the pipeline before it is empty
            again: the gradient accumulation of an update, or the iterations of a call.
        trains: Whether there are backward stages.

    Example:
        >>> schedule = PipelineSchedule(4, 10, trains=True)
        >>> schedule.num_cycles, schedule.num_full_cycles, schedule.idle_share
        (16, 4, 0.375)
    """

    stages: int
    micro_batches: int
    trains: bool

    @property
    def num_slots(self) -> int:
        """Slots that each micro-batch goes through, one per cycle."""
        return 2 * self.stages - 1 if self.trains else self.stages

    @property
    def num_cycles(self) -> int:
        """Cycles from the first micro-batch's first slot to the last one's last."""
        return self.micro_batches + self.num_slots - 1

    @property
    def num_full_cycles(self) -> int:
        """Cycles in which all slots work; 0 with too few micro-batches to fill them."""
        return max(self.micro_batches - self.num_slots + 1, 0)

    @property
    def idle_share(self) -> float:
        """Share of all slots of all cycles that have nothing to do, from 0 to 1.

        It is `(slots - 1) / cycles`, the bubble of the pipeline.
        """
        return (self.num_slots - 1) / self.num_cycles

    def micro_batch_in(self, slot: int, cycle: int) -> int | None:
        """The micro-batch that a slot works on in a cycle; None while it is idle.

        Args:
            slot: 0 for the first forward stage.
            cycle: 0 for the first.

        Example:
            >>> schedule = PipelineSchedule(2, 3, trains=True)
            >>> [schedule.micro_batch_in(2, cycle) for cycle in range(5)]
            [None, None, 0, 1, 2]
        """
        number = cycle - slot
        return number if 0 <= number < self.micro_batches else None

    def stage_of(self, slot: int) -> int:
        """The stage whose IPU runs a slot: backward slots come back to the first.

        Example:
            >>> schedule = PipelineSchedule(3, 8, trains=True)
            >>> [schedule.stage_of(slot) for slot in range(schedule.num_slots)]
            [0, 1, 2, 1, 0]
        """
        return min(slot, 2 * self.stages - 2 - slot) if self.trains else slot
