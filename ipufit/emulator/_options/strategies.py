# SPDX-License-Identifier: Apache-2.0
"""Phases and execution strategies: where blocks run, and when.

A strategy changes no number. It refuses some programs, and gives each block an IPU and
a stage, which decide whether a pipeline fits its gradient accumulation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Iterable, TypeVar

from ipufit.emulator._ground.checks import require, require_type
from ipufit.emulator._options.stages import (
    UNSET,
    AutomaticStages,
    BlockId,
    ExplicitStages,
    Stage,
    StageManager,
)
from ipufit.emulator.enums import AutoStage, Liveness

_PIPELINED, _SHARDED, _PHASED = 0, 1, 2

_PhasedT = TypeVar("_PhasedT", bound="_PhasedExecution")


class Phase:
    """Stages that run at the same time.

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
    """Base of the strategies: knows the stage of each block."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._block_stages: dict[BlockId, Stage] = {}
        for stage in stages:
            for block_id in stage.blocks:
                require(
                    block_id not in self._block_stages,
                    f"{block_id} associated with more than one stage.",
                )
                self._block_stages[block_id] = stage
        self._manager: StageManager = ExplicitStages(self._block_stages)

    def stage(self, block_id: BlockId) -> Stage:
        """Return the stage of a block that the strategy was given.

        Raises:
            AssertionError: If it wasn't given the block. An automatic strategy is
                given none.
        """
        require(
            block_id in self._block_stages,
            f"Unknown block {block_id}. Given: {', '.join(self._block_stages)}.",
        )
        return self._block_stages[block_id]

    @abstractmethod
    def backendOptions(self) -> dict[str, Any]:
        """Return the strategy's settings for the backend, by name."""


class PipelinedExecution(ExecutionStrategy):
    """Stages that work on successive micro-batches at the same time.

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

    _execution_mode = _PIPELINED

    def __init__(self, *args: AutoStage | BlockId | Stage | Iterable[BlockId]) -> None:
        auto_stage = AutoStage.SameAsIpu
        stages: list[Stage] = []
        if len(args) == 1 and isinstance(args[0], AutoStage):
            auto_stage = args[0]
        else:
            stages = [_as_stage(arg) for arg in args]
        for number, stage in enumerate(stages):
            stage._stage_id = number
            stage._phase_id = UNSET
        super().__init__(stages)
        if not self._block_stages:
            self._manager = AutomaticStages(auto_stage)

    def backendOptions(self) -> dict[str, Any]:
        """Return the strategy's settings for the backend, by name."""
        return {"execution_mode": self._execution_mode}


class ShardedExecution(PipelinedExecution):
    """Stages on several IPUs, one working at a time.

    It takes the same arguments as `PipelinedExecution`.

    Example:
        >>> from ipufit.emulator import ShardedExecution
        >>> ShardedExecution("embed", "head").backendOptions()
        {'execution_mode': 1}
    """

    _execution_mode = _SHARDED


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
                stage._stage_id = UNSET
                stage._phase_id = number
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
            "execution_mode": _PHASED,
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": self._tensors_liveness.value,
            "serial_phases_execution": self._is_serial,
        }


class SerialPhasedExecution(_PhasedExecution):
    """Phases that run one after the other on the same IPUs.

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
    """Phases that overlap: even ones on even IPUs, odd ones on odd IPUs.

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
    """Whether a strategy is a `PipelinedExecution` and not a `ShardedExecution`.

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
