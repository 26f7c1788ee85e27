# SPDX-License-Identifier: Apache-2.0
"""Stages, and the search for the stage of a block that a trace meets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeVar

from ipufit.emulator._ground.checks import require, require_type
from ipufit.emulator.enums import AutoStage

BlockId = str
"""The name of a block."""

UNSET = -1
"""PopTorch's number for a stage or phase that a strategy doesn't have."""

_StageT = TypeVar("_StageT", bound="Stage")


@dataclass(frozen=True)
class BlockPlacement:
    """IPU, stage and phase in which a block runs.

    Attributes:
        block_id: Name of the block.
        stage: Index of the stage; -1 with phases.
        ipu: Number of the IPU; -1, which no device accepts, if a phase has none.
        phase: Index of the phase; -1 without phases.

    Example:
        >>> BlockPlacement("head", stage=1, ipu=1, phase=-1).ipu
        1
    """

    block_id: str
    stage: int
    ipu: int
    phase: int


BEFORE_BLOCKS = BlockPlacement("", stage=0, ipu=0, phase=0)
"""Placement of operations before the first block (PopTorch, `CompilerImpl.hpp`)."""


class Stage:
    """Blocks that run together on one IPU.

    A strategy numbers the stages it is given: don't give one stage to two strategies.

    Args:
        block_ids: Names of the blocks.

    Raises:
        AssertionError: If a name isn't a str.

    Example:
        >>> from ipufit.emulator import Stage
        >>> Stage("embed", "encode").ipu(1).blocks
        ('embed', 'encode')
    """

    def __init__(self, *block_ids: BlockId) -> None:
        for block_id in block_ids:
            require_type("block_ids", block_id, str)
        self._blocks = block_ids
        self._stage_id = UNSET
        self._phase_id = UNSET
        self._ipu: int | None = None

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        """Names of the blocks."""
        return self._blocks

    def ipu(self: _StageT, ipu: int) -> _StageT:
        """Choose the IPU; one that a block names has no effect then."""
        require_type("ipu", ipu, int)
        self._ipu = ipu
        return self


class StageManager(ABC):
    """Finds the stage of each block of a model being traced.

    It belongs to a strategy and, as in PopTorch, remembers automatic ids and
    stages from one trace to the next.
    """

    def __init__(self) -> None:
        self._next_auto_id = 0

    def next_auto_id(self) -> BlockId:
        block_id = str(self._next_auto_id)
        self._next_auto_id += 1
        return block_id

    def reset_auto_id(self) -> None:
        self._next_auto_id = 0

    @abstractmethod
    def find_stage(self, block_id: BlockId, ipu_id: int | None) -> Stage:
        """Return the stage of a block.

        Args:
            block_id: Name of the block.
            ipu_id: IPU that the block names, if any.
        """

    def place(self, user_id: BlockId | None, ipu_id: int | None) -> BlockPlacement:
        """Choose where a block runs.

        Its IPU is the stage's; else the one that the block names; else the number of
        the stage.

        Raises:
            AssertionError: If the block is unknown, or has no IPU but needs one.
            RuntimeError: If its IPU isn't an int.
        """
        block_id = user_id or self.next_auto_id()
        stage = self.find_stage(block_id, ipu_id)
        ipu = stage._ipu
        if ipu is None:
            ipu = stage._stage_id if ipu_id is None else ipu_id
        if not isinstance(ipu, int):
            raise RuntimeError(
                f"Block '{block_id}': expected an int as IPU, not {ipu!r}."
            )
        return BlockPlacement(block_id, stage._stage_id, ipu, stage._phase_id)


class ExplicitStages(StageManager):
    """Finds blocks in the stages that a strategy was given."""

    def __init__(self, stages: dict[BlockId, Stage]) -> None:
        super().__init__()
        self._stages = stages

    def find_stage(self, block_id: BlockId, ipu_id: int | None) -> Stage:
        require(
            block_id in self._stages,
            f"Unknown Block '{block_id}'. The execution strategy lists: "
            f"{', '.join(self._stages)}.",
        )
        return self._stages[block_id]


class AutomaticStages(StageManager):
    """Makes a stage for each block it meets."""

    def __init__(self, auto_stage: AutoStage) -> None:
        super().__init__()
        self._auto_stage = auto_stage
        self._stages: dict[BlockId, Stage] = {}

    def find_stage(self, block_id: BlockId, ipu_id: int | None) -> Stage:
        require_type("user_id", block_id, str)
        if block_id not in self._stages:
            stage = Stage(block_id)
            stage._stage_id = self._new_number(block_id, ipu_id)
            self._stages[block_id] = stage
        return self._stages[block_id]

    def _new_number(self, block_id: BlockId, ipu_id: int | None) -> int:
        if self._auto_stage is AutoStage.AutoIncrement:
            return len(self._stages) + 1  # stage 0 is before the first block
        if ipu_id is None:
            raise AssertionError(
                "poptorch.AutoStage.SameAsIpu was selected but no IPU was given for "
                f"block '{block_id}': pass `ipu_id`, or use AutoStage.AutoIncrement."
            )
        return ipu_id
