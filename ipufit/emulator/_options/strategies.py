# SPDX-License-Identifier: Apache-2.0
"""Stages, phases and execution strategies: where blocks run, and when.

A strategy changes no number. It refuses some programs, and assigns each block an IPU
and a stage. A pipeline needs at least as many accumulated micro-batches as stages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Iterable, TypeVar

from ipufit.emulator.enums import AutoStage, Liveness
from ipufit.emulator.errors import require, require_type

BlockId = str
"""The name of a block."""

_UNSET = -1
"""PopTorch's number for a stage or phase that a strategy doesn't have."""

_PhasedT = TypeVar("_PhasedT", bound="_PhasedExecution")


@dataclass(frozen=True)
class BlockPlacement:
    """IPU, stage and phase in which a block runs.

    Attributes:
        block_id: Name of the block.
        stage: Index of the stage; -1 with phases.
        ipu: Number of the IPU; -1 if a phase has none, which no device accepts.
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
    """A stage: blocks that run together on one IPU.

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
        self._stage_id = _UNSET
        self._phase_id = _UNSET
        self._ipu: int | None = None

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        """Names of the blocks."""
        return self._blocks

    def ipu(self, ipu: int) -> Stage:
        """Choose the IPU; the IPU that a block names then has no effect."""
        require_type("ipu", ipu, int)
        self._ipu = ipu
        return self


class Phase:
    """A phase: stages that run at the same time.

    Args:
        arg: Stages, or names of the blocks of a single stage.

    Raises:
        AssertionError: If stages and names are mixed, or one is neither.

    Example:
        >>> from ipufit.emulator import Phase, Stage
        >>> len(Phase("a", "b").stages), len(Phase(Stage("a"), Stage("b")).stages)
        (1, 2)
    """

    def __init__(self, *arg: BlockId | Stage) -> None:
        stages = tuple(a for a in arg if isinstance(a, Stage))
        names = tuple(a for a in arg if isinstance(a, str))
        require(
            len(arg) in (len(stages), len(names)),
            f"A phase takes stages only or block ids only: {arg!r}.",
        )
        self._stages = (Stage(*names),) if names else stages

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the phase."""
        return self._stages

    def stage(self, idx: int) -> Stage:
        """Return the stage at index `idx`."""
        return self._stages[idx]

    def ipus(self, *ipus: int) -> None:
        """Choose the IPU of each stage.

        Raises:
            AssertionError: If there are more or fewer IPUs than stages.
        """
        require(
            len(ipus) == len(self._stages),
            f"{len(ipus)} IPUs for {len(self._stages)} stages: give one each.",
        )
        for stage, ipu in zip(self._stages, ipus):
            stage.ipu(ipu)


class ExecutionStrategy(ABC):
    """Base of the strategies, which map each block to a stage.

    As in PopTorch it remembers automatic ids and stages from one trace to the next.

    Args:
        stages: The stages. No block may be in two of them.
        auto_stage: How to number the stage of a block that is in no stage; None refuses
            such a block.
    """

    def __init__(
        self, stages: Iterable[Stage], auto_stage: AutoStage | None = None
    ) -> None:
        self._block_stages: dict[BlockId, Stage] = {}
        for stage in stages:
            for block_id in stage.blocks:
                require(
                    block_id not in self._block_stages,
                    f"{block_id} associated with more than one stage.",
                )
                self._block_stages[block_id] = stage
        self._auto_stage = None if self._block_stages else auto_stage
        self._automatic_stages: dict[BlockId, Stage] = {}
        self._num_auto_ids = 0

    def stage(self, block_id: BlockId) -> Stage:
        """Return the stage of a block that the strategy was given.

        Raises:
            AssertionError: If the strategy wasn't given the block. An automatic
                strategy is given no blocks.
        """
        require(
            block_id in self._block_stages,
            f"Unknown block {block_id}. Given: {', '.join(self._block_stages)}.",
        )
        return self._block_stages[block_id]

    @abstractmethod
    def backendOptions(self) -> dict[str, Any]:
        """Return the strategy's settings for the backend, by name."""

    def _next_auto_id(self) -> BlockId:
        self._num_auto_ids += 1
        return str(self._num_auto_ids - 1)

    def _reset_auto_id(self) -> None:
        self._num_auto_ids = 0

    def _place(self, user_id: BlockId | None, ipu_id: int | None) -> BlockPlacement:
        """Choose IPU, stage and phase of a block that begins in a trace.

        The IPU is that of the stage, or else the block's `ipu_id`, or else the number
        of the stage.

        Raises:
            AssertionError: If the block is unknown, or has no IPU but needs one.
            RuntimeError: If its IPU isn't an int.
        """
        block_id = user_id or self._next_auto_id()
        stage = self._find_stage(block_id, ipu_id)
        ipu = stage._ipu
        if ipu is None:
            ipu = stage._stage_id if ipu_id is None else ipu_id
        if not isinstance(ipu, int):
            raise RuntimeError(
                f"Block '{block_id}': expected an int as IPU, not {ipu!r}."
            )
        return BlockPlacement(block_id, stage._stage_id, ipu, stage._phase_id)

    def _find_stage(self, block_id: BlockId, ipu_id: int | None) -> Stage:
        if self._auto_stage is None:
            require(
                block_id in self._block_stages,
                f"Unknown Block '{block_id}'. The execution strategy lists: "
                f"{', '.join(self._block_stages)}.",
            )
            return self._block_stages[block_id]
        require_type("user_id", block_id, str)
        if block_id not in self._automatic_stages:
            number = ipu_id
            if self._auto_stage is AutoStage.AutoIncrement:
                # Stage 0 is before the first block.
                number = len(self._automatic_stages) + 1
            if number is None:
                raise AssertionError(
                    "poptorch.AutoStage.SameAsIpu was selected but no IPU was given "
                    f"for block '{block_id}': pass `ipu_id`, or use "
                    "AutoStage.AutoIncrement."
                )
            stage = self._automatic_stages[block_id] = Stage(block_id)
            stage._stage_id = number
        return self._automatic_stages[block_id]


class PipelinedExecution(ExecutionStrategy):
    """Strategy whose stages work on successive micro-batches at the same time.

    Args:
        args: One argument per stage: a `Stage`, the name of its only block, or an
            iterable of its blocks' names. Without arguments, or with one `AutoStage`,
            stages are made for the blocks that a trace meets.

    Raises:
        AssertionError: If a block is in two stages, or a name isn't a str.
        TypeError: If an argument is none of these.

    Example:
        >>> from ipufit.emulator import PipelinedExecution, Stage
        >>> strategy = PipelinedExecution("embed", ["encode", "pool"], Stage("head"))
        >>> strategy.stage("pool").blocks
        ('encode', 'pool')
        >>> strategy.backendOptions()
        {'execution_mode': 0}
    """

    _execution_mode = 0

    def __init__(self, *args: AutoStage | BlockId | Stage | Iterable[BlockId]) -> None:
        auto_stage, stages = AutoStage.SameAsIpu, []
        if len(args) == 1 and isinstance(args[0], AutoStage):
            auto_stage = args[0]
        else:
            stages = [_as_stage(arg) for arg in args]
        for number, stage in enumerate(stages):
            stage._stage_id, stage._phase_id = number, _UNSET
        super().__init__(stages, auto_stage)

    def backendOptions(self) -> dict[str, Any]:
        """Return the strategy's settings for the backend, by name."""
        return {"execution_mode": self._execution_mode}


class ShardedExecution(PipelinedExecution):
    """Strategy with stages on several IPUs that work in turn.

    It takes the same arguments as `PipelinedExecution`.

    Example:
        >>> from ipufit.emulator import ShardedExecution
        >>> ShardedExecution("embed", "head").backendOptions()
        {'execution_mode': 1}
    """

    _execution_mode = 1


class _PhasedExecution(ExecutionStrategy):
    """Base of the strategies that keep most of the model off the chip."""

    _is_serial: bool

    def __init__(
        self, *phases: Phase | Stage | BlockId | list[Stage] | list[BlockId]
    ) -> None:
        require(phases, "Phases can't be found automatically: list them.")
        self._phases = [_as_phase(phase) for phase in phases]
        self._tensors_liveness = Liveness.AlwaysLive
        self._separate_backward_phase = False
        for number, phase in enumerate(self._phases):
            for stage in phase.stages:
                stage._stage_id, stage._phase_id = _UNSET, number
        super().__init__(stage for phase in self._phases for stage in phase.stages)

    def phase(self, phase: int) -> Phase:
        """Return the phase at index `phase`.

        Raises:
            AssertionError: If the index isn't an int from 0.
        """
        require(
            isinstance(phase, int) and phase >= 0,
            f"A phase's position is an int from 0: {phase!r}.",
        )
        return self._phases[phase]

    def useSeparateBackwardPhase(self: _PhasedT, use: bool = True) -> _PhasedT:
        """Choose whether the last phase's backward pass is a phase of its own."""
        require_type("use", use, bool)
        self._separate_backward_phase = use
        return self

    def backendOptions(self) -> dict[str, Any]:
        """Return the strategy's settings for the backend, by name."""
        return {
            "execution_mode": 2,
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": self._tensors_liveness.value,
            "serial_phases_execution": self._is_serial,
        }


class SerialPhasedExecution(_PhasedExecution):
    """Strategy whose phases run in turn on the same IPUs.

    Args:
        phases: Each is a `Phase`, a `Stage`, the name of one block, or a list of
            only stages or only names. Every block needs an IPU.

    Raises:
        AssertionError: If there is no phase, one has another type, or a block occurs
            twice.

    Example:
        >>> from ipufit.emulator import Phase, SerialPhasedExecution, Stage
        >>> strategy = SerialPhasedExecution("embed", Phase(Stage("a"), Stage("b")))
        >>> strategy.phase(0).ipus(0)
        >>> strategy.phase(1).ipus(0, 1)
    """

    _is_serial = True

    def setTensorsLiveness(self: _PhasedT, liveness: Liveness) -> _PhasedT:
        """Choose when tensors leave the chip."""
        require_type("liveness", liveness, Liveness)
        self._tensors_liveness = liveness
        return self


class ParallelPhasedExecution(_PhasedExecution):
    """Strategy whose phases overlap: even ones on even IPUs, odd ones on odd IPUs.

    Args:
        phases: Each is a `Phase`, a `Stage`, the name of one block, or a list of
            only stages or only names. Every block needs an IPU.

    Raises:
        AssertionError: If there is no phase, one has another type, or a block occurs
            twice.

    Example:
        >>> from ipufit.emulator import ParallelPhasedExecution
        >>> strategy = ParallelPhasedExecution("a", "b").sendTensorsOffChipAfterFwd()
        >>> strategy.backendOptions()["tensors_liveness"]
        1
    """

    _is_serial = False

    def sendTensorsOffChipAfterFwd(self: _PhasedT, off_chip: bool = True) -> _PhasedT:
        """Choose whether tensors leave the chip after the forward pass."""
        require_type("off_chip", off_chip, bool)
        self._tensors_liveness = (
            Liveness.OffChipAfterFwd if off_chip else Liveness.AlwaysLive
        )
        return self


def is_pipelined(strategy: ExecutionStrategy) -> bool:
    """Return whether a strategy is a `PipelinedExecution` and not a `ShardedExecution`.

    Example:
        >>> is_pipelined(PipelinedExecution()), is_pipelined(ShardedExecution())
        (True, False)
    """
    return isinstance(strategy, PipelinedExecution) and not isinstance(
        strategy, ShardedExecution
    )


def _as_stage(arg: Any) -> Stage:
    if isinstance(arg, Stage):
        return arg
    return Stage(arg) if isinstance(arg, str) else Stage(*arg)


def _as_phase(arg: Any) -> Phase:
    if isinstance(arg, Phase):
        return arg
    require(
        isinstance(arg, (Stage, str, list)),
        f"A phase is a Phase, a Stage, a str, or a list of them, not {arg!r}.",
    )
    return Phase(*arg) if isinstance(arg, list) else Phase(arg)
