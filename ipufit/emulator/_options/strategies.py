# SPDX-License-Identifier: Apache-2.0
"""Stages, phases and execution strategies: where blocks run, and when.

The emulator computes the same numbers whatever the strategy. What counts is what
a strategy refuses, and the IPU and stage of each block, which decide whether a
pipeline fits its gradient accumulation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Iterable, TypeVar

from ipufit.emulator._ground.checks import require
from ipufit.emulator._options.stages import (
    UNSET,
    AutomaticStages,
    BlockId,
    ExplicitStages,
    Stage,
    StageManager,
)
from ipufit.emulator.enums import AutoStage, Liveness

__all__ = [
    "BlockId",
    "ExecutionStrategy",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "is_pipelined",
]

_PIPELINED = 0
_SHARDED = 1
_PHASED = 2

_PhasedT = TypeVar("_PhasedT", bound="_PhasedExecution")
_SerialT = TypeVar("_SerialT", bound="SerialPhasedExecution")
_ParallelT = TypeVar("_ParallelT", bound="ParallelPhasedExecution")


class Phase:
    """Stages that run at the same time.

    Args:
        arg: Either stages, or the names of the blocks of a single stage.

    Raises:
        AssertionError: If they are mixed, or anything else.

    Example:
        >>> from ipufit.emulator import Phase, Stage
        >>> len(Phase("a", "b").stages), len(Phase(Stage("a"), Stage("b")).stages)
        (1, 2)
    """

    def __init__(self, *arg: BlockId | Stage) -> None:
        stages = tuple(a for a in arg if isinstance(a, Stage))
        if len(stages) == len(arg):
            self._stages = stages
        else:
            names = tuple(a for a in arg if isinstance(a, str))
            require(
                len(names) == len(arg),
                f"A phase takes stages only or block ids only: {arg!r}.",
            )
            self._stages = (Stage(*names),)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages."""
        return self._stages

    def stage(self, idx: int) -> Stage:
        """Return one of the stages.

        Args:
            idx: Its position.

        Returns:
            The stage.

        Raises:
            IndexError: If there are fewer.
        """
        return self._stages[idx]

    def ipus(self, *ipus: int) -> None:
        """Choose the IPU of each stage.

        Args:
            ipus: As many as there are stages.

        Raises:
            AssertionError: If there are more or fewer, or one isn't an int.
        """
        require(
            len(ipus) == len(self._stages),
            f"{len(ipus)} IPUs for {len(self._stages)} stages: give one each.",
        )
        for stage, ipu in zip(self._stages, ipus):
            stage.ipu(ipu)


class ExecutionStrategy(ABC):
    """Base of the strategies: which stage each block belongs to."""

    _manager: StageManager
    _block_stages: dict[BlockId, Stage]

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._block_stages = {}
        for stage in stages:
            for block_id in stage.blocks:
                require(
                    block_id not in self._block_stages,
                    f"{block_id} associated with more than one stage.",
                )
                self._block_stages[block_id] = stage
        self._manager = ExplicitStages(self._block_stages)

    def stage(self, block_id: BlockId) -> Stage:
        """Return the stage a block was given.

        Args:
            block_id: The block.

        Returns:
            The stage.

        Raises:
            AssertionError: If the strategy wasn't given the block; an automatic
                one never was.
        """
        require(
            block_id in self._block_stages,
            f"Unknown block {block_id}. Given: {', '.join(self._block_stages)}.",
        )
        return self._block_stages[block_id]

    @abstractmethod
    def backendOptions(self) -> dict[str, Any]:
        """Return the settings the backend needs.

        Returns:
            Values by name.
        """


class PipelinedExecution(ExecutionStrategy):
    """Stages that work on successive micro-batches at the same time.

    Args:
        args: Nothing or one `AutoStage` for automatic stages; otherwise one
            argument per stage: a `Stage`, the name of its only block, or an
            iterable of its blocks' names.

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
        """Return the settings the backend needs.

        Returns:
            Values by name.
        """
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
    """Base of the strategies that keep most of the model off the chip.

    Args:
        phases: In order. Each is a `Phase`, a `Stage`, the name of one block,
            or a list of only stages or only names.

    Raises:
        AssertionError: If there is none, one isn't of these, or a block occurs
            twice.
    """

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
        """Return one of the phases.

        Args:
            phase: Its position.

        Returns:
            The phase.

        Raises:
            AssertionError: If the position isn't an int from 0.
            IndexError: If there are fewer phases.
        """
        require(
            isinstance(phase, int) and phase >= 0,
            f"A phase's position is an int from 0: {phase!r}.",
        )
        return self._phases[phase]

    def useSeparateBackwardPhase(self: _PhasedT, use: bool = True) -> _PhasedT:
        """Give the backward pass of the last phase a phase of its own.

        Args:
            use: Whether to.

        Returns:
            The strategy.

        Raises:
            AssertionError: If `use` isn't a bool.
        """
        require(isinstance(use, bool), f"`use` must be a bool: {use!r}.")
        self._separate_backward_phase = use
        return self

    def backendOptions(self) -> dict[str, Any]:
        """Return the settings the backend needs.

        Returns:
            Values by name.
        """
        return {
            "execution_mode": _PHASED,
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": self._tensors_liveness.value,
            "serial_phases_execution": self._is_serial,
        }


class SerialPhasedExecution(_PhasedExecution):
    """Phases that run one after the other on the same IPUs.

    Args:
        phases: In order. Each is a `Phase`, a `Stage`, the name of one block,
            or a list of only stages or only names. Every block needs an IPU.

    Raises:
        AssertionError: If there is none, one isn't of these, or a block occurs
            twice.

    Example:
        >>> from ipufit.emulator import Phase, SerialPhasedExecution, Stage
        >>> strategy = SerialPhasedExecution("embed", Phase(Stage("a"), Stage("b")))
        >>> strategy.phase(0).ipus(0)
        >>> strategy.phase(1).ipus(0, 1)
    """

    _is_serial = True

    def setTensorsLiveness(self: _SerialT, liveness: Liveness) -> _SerialT:
        """Choose when tensors leave the chip.

        Args:
            liveness: When.

        Returns:
            The strategy.

        Raises:
            AssertionError: If it isn't a `Liveness`.
        """
        require(isinstance(liveness, Liveness), f"{liveness!r}: use Liveness.")
        self._tensors_liveness = liveness
        return self


class ParallelPhasedExecution(_PhasedExecution):
    """Phases that overlap: even ones on even IPUs, odd ones on odd IPUs.

    Args:
        phases: In order. Each is a `Phase`, a `Stage`, the name of one block,
            or a list of only stages or only names. Every block needs an IPU.

    Raises:
        AssertionError: If there is none, one isn't of these, or a block occurs
            twice.

    Example:
        >>> from ipufit.emulator import ParallelPhasedExecution
        >>> strategy = ParallelPhasedExecution("a", "b").sendTensorsOffChipAfterFwd()
        >>> strategy.backendOptions()["tensors_liveness"]
        1
    """

    _is_serial = False

    def sendTensorsOffChipAfterFwd(
        self: _ParallelT, off_chip: bool = True
    ) -> _ParallelT:
        """Move tensors off the chip after the forward pass.

        Args:
            off_chip: Whether to.

        Returns:
            The strategy.

        Raises:
            AssertionError: If it isn't a bool.
        """
        require(isinstance(off_chip, bool), f"`off_chip` must be a bool: {off_chip!r}.")
        self._tensors_liveness = (
            Liveness.OffChipAfterFwd if off_chip else Liveness.AlwaysLive
        )
        return self


def is_pipelined(strategy: ExecutionStrategy) -> bool:
    """Tell whether a strategy's constraints on pipelines apply.

    Args:
        strategy: An execution strategy.

    Returns:
        Whether it is a `PipelinedExecution`, but not a `ShardedExecution`.

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
    if isinstance(arg, str):
        return Stage(arg)
    return Stage(*arg)


def _as_phase(arg: Any) -> Phase:
    if isinstance(arg, Phase):
        return arg
    if isinstance(arg, (Stage, str)):
        return Phase(arg)
    if not isinstance(arg, list):
        raise AssertionError(
            f"A phase is a Phase, a Stage, a str, or a list of them, not {arg!r}."
        )
    return Phase(*arg)
