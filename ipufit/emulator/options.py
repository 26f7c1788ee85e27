# SPDX-License-Identifier: Apache-2.0
"""`Options`: how a model is compiled and run; `Settings`, read from them.

Options keep the type of each value. They can be frozen and copied. `Training` and
`Precision` store some settings in `Options._Popart`.
"""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Callable, Iterable, Sequence, TypeVar

import torch

from . import enums
from ._logging import logger
from ._switches import ipu_model_is_on
from .errors import require, require_type

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

    Attributes:
        stages: The stages of the phase.

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
        self.stages = (Stage(*names),) if names else stages

    def stage(self, idx: int) -> Stage:
        """Return the stage at index `idx`."""
        return self.stages[idx]

    def ipus(self, *ipus: int) -> None:
        """Choose the IPU of each stage.

        Raises:
            AssertionError: If there are more or fewer IPUs than stages.
        """
        require(
            len(ipus) == len(self.stages),
            f"{len(ipus)} IPUs for {len(self.stages)} stages: give one each.",
        )
        for stage, ipu in zip(self.stages, ipus):
            stage.ipu(ipu)


class ExecutionStrategy:
    """Base of the strategies, which map each block to a stage.

    As in PopTorch it remembers automatic ids and stages from one trace to the next.

    Args:
        stages: The stages. No block may be in two of them.
        auto_stage: How to number the stage of a block that is in no stage; None refuses
            such a block.
    """

    _execution_mode: int

    def __init__(
        self, stages: Iterable[Stage], auto_stage: enums.AutoStage | None = None
    ) -> None:
        self._stages: dict[BlockId, Stage] = {}
        for stage in stages:
            for block_id in stage.blocks:
                require(
                    block_id not in self._stages,
                    f"{block_id} associated with more than one stage.",
                )
                self._stages[block_id] = stage
        self._auto_stage = None if self._stages else auto_stage
        self._num_auto_ids = 0

    def stage(self, block_id: BlockId) -> Stage:
        """Return the stage of a block that the strategy lists.

        Raises:
            AssertionError: If it doesn't list the block. An automatic strategy lists
                the blocks of its model's traces.
        """
        require(
            block_id in self._stages,
            f"Unknown block {block_id}. Given: {', '.join(self._stages)}.",
        )
        return self._stages[block_id]

    def backendOptions(self) -> dict[str, Any]:
        """Return the strategy's settings for the backend, by name."""
        return {"execution_mode": self._execution_mode}

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
        if self._auto_stage is not None:
            require_type("user_id", block_id, str)
            self._add_automatic_stage(block_id, ipu_id)
        require(
            block_id in self._stages,
            f"Unknown Block '{block_id}'. The execution strategy lists: "
            f"{', '.join(self._stages)}.",
        )
        stage = self._stages[block_id]
        choices = (stage._ipu, ipu_id, stage._stage_id)
        ipu = next(choice for choice in choices if choice is not None)
        if not isinstance(ipu, int):
            raise RuntimeError(
                f"Block '{block_id}': expected an int as IPU, not {ipu!r}."
            )
        return BlockPlacement(block_id, stage._stage_id, ipu, stage._phase_id)

    def _add_automatic_stage(self, block_id: BlockId, ipu_id: int | None) -> None:
        if block_id in self._stages:
            return
        number = ipu_id
        if self._auto_stage is enums.AutoStage.AutoIncrement:
            number = len(self._stages) + 1  # stage 0 is before the first block
        if number is None:
            raise AssertionError(
                "poptorch.AutoStage.SameAsIpu was selected but no IPU was given "
                f"for block '{block_id}': pass `ipu_id`, or use "
                "AutoStage.AutoIncrement."
            )
        self._stages[block_id] = Stage(block_id)
        self._stages[block_id]._stage_id = number


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

    def __init__(
        self, *args: enums.AutoStage | BlockId | Stage | Iterable[BlockId]
    ) -> None:
        auto_stage, stages = enums.AutoStage.SameAsIpu, []
        if len(args) == 1 and isinstance(args[0], enums.AutoStage):
            auto_stage = args[0]
        else:
            stages = [_as_stage(arg) for arg in args]
        for number, stage in enumerate(stages):
            stage._stage_id, stage._phase_id = number, _UNSET
        super().__init__(stages, auto_stage)


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

    _execution_mode = 2
    _is_serial: bool

    def __init__(
        self, *phases: Phase | Stage | BlockId | list[Stage] | list[BlockId]
    ) -> None:
        require(phases, "Phases can't be found automatically: list them.")
        self._phases = [_as_phase(phase) for phase in phases]
        self._settings = {
            "separate_backward_phase": False,
            "tensors_liveness": enums.Liveness.AlwaysLive.value,
            "serial_phases_execution": self._is_serial,
        }
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
        self._settings["separate_backward_phase"] = use
        return self

    def backendOptions(self) -> dict[str, Any]:
        """Return the strategy's settings for the backend, by name."""
        return {**super().backendOptions(), **self._settings}


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

    def setTensorsLiveness(self: _PhasedT, liveness: enums.Liveness) -> _PhasedT:
        """Choose when tensors leave the chip."""
        require_type("liveness", liveness, enums.Liveness)
        self._settings["tensors_liveness"] = liveness.value
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
        liveness = enums.Liveness
        chosen = liveness.OffChipAfterFwd if off_chip else liveness.AlwaysLive
        self._settings["tensors_liveness"] = chosen.value
        return self


def is_pipelined(strategy: ExecutionStrategy) -> bool:
    """Return whether a strategy is a `PipelinedExecution` and not a `ShardedExecution`.

    Example:
        >>> is_pipelined(PipelinedExecution()), is_pipelined(ShardedExecution())
        (True, False)
    """
    return strategy._execution_mode == PipelinedExecution._execution_mode


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


_OptionsT = TypeVar("_OptionsT", bound="OptionsDict")


class Freezable:
    """Base of options that can be frozen; copies are never frozen."""

    _is_frozen: bool

    def checkIsFrozen(self, option: str | None = None) -> None:
        """Raise if a model or a data loader uses these options.

        Args:
            option: Name of the option to change. It is ignored.

        Raises:
            AttributeError: If they are frozen.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().checkIsFrozen()
        """
        if self._is_frozen:
            raise AttributeError(
                "Can't modify frozen Options: a data loader or a model uses them. "
                "Change a copy instead: `options.clone()`."
            )

    def _freeze(self, is_frozen: bool = True) -> None:
        self.__dict__["_is_frozen"] = is_frozen
        for part in self.__dict__.values():
            if isinstance(part, Freezable):
                part._freeze(is_frozen)

    def _unfreeze(self) -> None:
        self._freeze(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Freezable:
        duplicate = self.__class__.__new__(self.__class__)
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo), _is_frozen=False)
        return duplicate


class OptionsDict(Freezable):
    """Base of options: public values by name, and private attributes.

    A subclass assigns both in its `__init__`, then calls `super().__init__()`. From
    then on an assignment adds no name, and a public value keeps its type.

    Args:
        **values: Further public values.

    Example:
        >>> from ipufit.emulator import Options
        >>> options = Options()
        >>> options.replication_factor = 4
        >>> options("replication_factor")
        4
    """

    _values: dict[str, Any]
    _popart: _PopartOptions  # in three subclasses

    def __init__(self, **values: Any) -> None:
        assigned = self.__dict__
        public = [name for name in assigned if name[0] != "_"]
        assigned["_values"] = {name: assigned.pop(name) for name in public}
        assigned["_values"].update(values)
        assigned["_is_frozen"] = False

    def set(self, **kwargs: Any) -> None:
        """Change existing options, one after the other.

        Args:
            kwargs: New values by name. Each must be an instance of the type of
                the value it replaces; ranges aren't checked.

        Raises:
            AttributeError: If the options are frozen.
            AssertionError: If an option doesn't exist or the type differs.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options()
            >>> options.set(device_iterations=8)
            >>> options.device_iterations
            8
        """
        self.checkIsFrozen()
        for name, value in kwargs.items():
            require(
                name in self._values,
                f"Invalid option {name}. Options here: {', '.join(self._values)}.",
            )
            expected = type(self._values[name])
            require(
                isinstance(value, expected),
                f"Unexpected type {type(value).__name__} for option {name}: "
                f"use {expected.__name__}.",
            )
            self._values[name] = value

    def createOrSet(self, **kwargs: Any) -> None:
        """Set options; create options that don't exist, with a value of any type.

        Args:
            kwargs: New values by name. The first value of an option decides the
                type of all later ones.

        Raises:
            AttributeError: If the options are frozen.
            AssertionError: If an option exists and the type differs.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options()
            >>> options.createOrSet(model_name="net")
            >>> options.model_name
            'net'
        """
        self.checkIsFrozen()
        for name, value in kwargs.items():
            self._values.setdefault(name, value)
            self.set(**{name: value})

    def _store(self: _OptionsT, **values: Any) -> _OptionsT:
        """Set or create options, and return `self`."""
        self.createOrSet(**values)
        return self

    def _set_popart(self: _OptionsT, key: str, value: Any) -> _OptionsT:
        """Set an option of PopART, and return `self`."""
        self._popart.set(key, value)
        return self

    def exists(self, option: str) -> bool:
        """Return whether a public option of this name has a value.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().exists("random_seed")
            False
        """
        return option in self._values

    def deleteIfExists(self, option: str) -> None:
        """Remove the public option of this name; as in PopTorch, also if frozen.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().modelName("net")
            >>> options.deleteIfExists("model_name")
            >>> options.exists("model_name")
            False
        """
        self._values.pop(option, None)

    def toDict(self) -> dict[str, Any]:
        """Copy the public options to a dict of values by name.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.toDict()["num_distributed_processes"]
            1
        """
        return self.update({})

    def update(self, other: dict[str, Any]) -> dict[str, Any]:
        """Add the public options to a dict of values by name, and return it.

        Raises:
            AssertionError: If a name is there already.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().useIOTilesToLoad().update({"onChip": 1})
            {'onChip': 1, 'useIOTilesToLoad': 1}
        """
        for name, value in self._values.items():
            require(
                name not in other,
                f"Option {name} is set in two places. Remove it from `_Popart`.",
            )
            other[name] = value
        return other

    def __call__(self, option: str) -> Any:
        return getattr(self, option)

    # Hidden from type checkers: with these in sight every misspelt option would
    # type check.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            values = self.__dict__.get("_values", {})  # absent while unpickling
            if name in values:
                return values[name]
            raise AttributeError(f"Invalid attribute {name}.")

        def __setattr__(self, name: str, value: Any) -> None:
            if "_is_frozen" not in self.__dict__:  # a subclass's `__init__`
                self.__dict__[name] = value
            elif name == "__class__":  # popdist swaps the class of `Distributed`
                object.__setattr__(self, name, value)
            elif not name.startswith("_"):
                self.set(**{name: value})
            elif name in self.__dict__:
                self.checkIsFrozen()
                self.__dict__[name] = value
            else:
                raise AttributeError(f"Invalid private attribute {name}.")

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._shown().items())
        return f"{type(self).__name__}({shown})"

    def _shown(self) -> dict[str, Any]:
        """Return names and values for `repr`."""
        hidden = ("_values", "_is_frozen")
        private = {k: v for k, v in self.__dict__.items() if k not in hidden}
        return {**self._values, **private}


class _PopartOptions(Freezable):
    """PopART session options by name, checked only when a model is compiled.

    Example:
        >>> from ipufit.emulator import Options
        >>> options = Options()
        >>> _ = options._Popart.set("enableOutlining", False)
        >>> options._Popart.options["enableOutlining"]
        False
    """

    options: dict[str, Any]

    def __init__(self) -> None:
        self._is_frozen = False
        self.options = {
            "instrumentWithHardwareCycleCounter": False,
            "rearrangeAnchorsOnHost": False,
        }

    def set(self, key: str, value: Any) -> _PopartOptions:
        """Set a session option by its PopART name."""
        self.checkIsFrozen()
        self.options[key] = value
        return self

    def setEngineOptions(self, engine_options: dict[str, str]) -> _PopartOptions:
        """Replace the options of Poplar's engine."""
        return self.set("engineOptions", engine_options)

    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> _PopartOptions:
        """Choose PopART's graph patterns.

        Args:
            patterns: Names of patterns; each runs or not.
            level: Number of the set of patterns to start from, one of PopART's
                `PatternsLevel`.
        """
        require_type("patterns", patterns, dict)
        require_type("level", level, int)
        return self.set("patterns_level", level).set("patterns", patterns)

    def __repr__(self) -> str:
        return f"_PopartOptions({self.options!r})"


class _TrainingOptions(OptionsDict):
    """`Options.Training`: how gradients are accumulated and reduced."""

    def __init__(self, popart_options: _PopartOptions) -> None:
        self.gradient_accumulation = 1
        self.accumulation_and_replication_reduction_type = enums.ReductionType.Mean
        self.meanAccumulationAndReplicationReductionStrategy = (
            enums.MeanReductionStrategy.Post
        )
        self._popart = popart_options
        super().__init__()

    def gradientAccumulation(self, gradient_accumulation: int) -> _TrainingOptions:
        """Set the number of micro-batches whose gradients one update accumulates.

        They are counted on each replica.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options()
            >>> options.Training.gradientAccumulation(4).gradient_accumulation
            4
        """
        return self._store(gradient_accumulation=gradient_accumulation)

    def accumulationAndReplicationReductionType(
        self, reduction_type: enums.ReductionType
    ) -> _TrainingOptions:
        """Average or add the gradients of micro-batches and replicas.

        `Mean` divides by gradient accumulation times replicas, whatever the
        reduction of the loss.

        Raises:
            ValueError: If the type is neither `Mean` nor `Sum`.

        Example:
            >>> from ipufit.emulator import Options, ReductionType
            >>> training = Options().Training
            >>> _ = training.accumulationAndReplicationReductionType(ReductionType.Sum)
            >>> training.accumulation_and_replication_reduction_type.name
            'Sum'
        """
        if not isinstance(reduction_type, enums.ReductionType) or (
            reduction_type is enums.ReductionType.NoReduction
        ):
            raise ValueError(
                "Gradients are reduced by ReductionType.Mean or ReductionType.Sum, "
                f"not {reduction_type!r}."
            )
        return self._store(accumulation_and_replication_reduction_type=reduction_type)

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: enums.MeanReductionStrategy
    ) -> _TrainingOptions:
        """Choose when a mean of gradients is divided.

        Compiling refuses the strategy `PostAndLoss`.

        Example:
            >>> from ipufit.emulator import MeanReductionStrategy, Options
            >>> training = Options().Training
            >>> _ = training.setMeanAccumulationAndReplicationReductionStrategy(
            ...     MeanReductionStrategy.Running
            ... )
        """
        return self._store(
            meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy
        )

    def setAutomaticLossScaling(self, enabled: bool) -> _TrainingOptions:
        """Choose whether PopART adapts the loss scaling.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Training.setAutomaticLossScaling(True)
        """
        return self._set_popart("automaticLossScalingSettings.enabled", enabled)

    def setConvolutionDithering(self, enabled: bool) -> _TrainingOptions:
        """Choose whether convolutions start on different tiles.

        As in PopTorch, this replaces every other option of convolutions, such as that
        of `Precision.setPartialsType`.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Training.setConvolutionDithering(True)
        """
        return self._set_popart("convolutionOptions", {"enableConvDithering": enabled})


class _PrecisionOptions(OptionsDict):
    """`Options.Precision`: rounding, partial sums and floating-point traps."""

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart = popart_options
        super().__init__()

    def enableFloatingPointExceptions(self, enabled: bool) -> _PrecisionOptions:
        """Choose whether invalid operations, division by zero and overflow stop a call.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Precision.enableFloatingPointExceptions(True)
        """
        require_type("enabled", enabled, bool)
        return self._set_popart("enableFloatingPointChecks", enabled)

    def enableStochasticRounding(self, enabled: bool) -> _PrecisionOptions:
        """Choose whether half precision is rounded at random.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Precision.enableStochasticRounding(True)
        """
        return self._set_popart("enableStochasticRounding", enabled)

    def setPartialsType(self, dtype: torch.dtype) -> _PrecisionOptions:
        """Choose the type of partial sums in matrix products and convolutions.

        As in PopTorch, this replaces every other option of convolutions, such as that
        of `Training.setConvolutionDithering`.

        Raises:
            ValueError: If the type is neither `torch.float` nor `torch.half`.

        Example:
            >>> import torch
            >>> from ipufit.emulator import Options
            >>> options = Options()
            >>> _ = options.Precision.setPartialsType(torch.half)
            >>> options._Popart.options["partialsTypeMatMuls"]
            'half'
        """
        if dtype not in (torch.float, torch.half):
            raise ValueError(f"Partials are torch.float or torch.half, not {dtype!r}.")
        name = "float" if dtype == torch.float else "half"
        self._popart.set("partialsTypeMatMuls", name)
        return self._set_popart("convolutionOptions", {"partialsType": name})

    def halfFloatCasting(self, half_float_casting: Any) -> _PrecisionOptions:
        """Warn that this setter has no effect any more: mixed operands become float.

        Example:
            >>> from ipufit.emulator import HalfFloatCastingBehavior, Options
            >>> precision = Options().Precision
            >>> _ = precision.halfFloatCasting(HalfFloatCastingBehavior.Default)
        """
        logger.warning(
            "Precision.halfFloatCasting is deprecated and has no effect: operations "
            "on half and float give float."
        )
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> _PrecisionOptions:
        """Warn that this setter has no effect any more.

        Raises:
            ValueError: If `value` isn't a bool.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Precision.runningStatisticsAlwaysFloat(True)
        """
        if not isinstance(value, bool):
            raise ValueError(f"`value` must be a bool: {value!r}.")
        logger.warning(
            "Precision.runningStatisticsAlwaysFloat is deprecated and has no effect."
        )
        return self


class _JitOptions(OptionsDict):
    """`Options.Jit`: tracing with torch.jit, which PopTorch no longer does."""

    def traceModel(self, trace_model: bool) -> _JitOptions:
        """Warn that this setter has no effect any more.

        Raises:
            ValueError: If `trace_model` is true.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Jit.traceModel(False)
        """
        logger.warning("Jit.traceModel is deprecated and has no effect.")
        if trace_model:
            raise ValueError(
                "PopTorch no longer traces with torch.jit: drop Jit.traceModel(True)."
            )
        return self


class _DistributedOptions(OptionsDict):
    """`Options.Distributed`: the index of this process, and how many there are.

    New options read both from the variables that `mpirun` of Open MPI sets.
    """

    def __init__(self) -> None:
        self.num_distributed_processes = 1
        self.distributed_process_id = 0
        self.ipuof_configs: dict[str, Any] = {}
        super().__init__()
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    @property
    def processId(self) -> int:
        """The index of this process.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.configureProcessId(1, 2).processId
            1
        """
        return self.distributed_process_id

    @property
    def numProcesses(self) -> int:
        """The number of processes that run together.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.configureProcessId(1, 2).numProcesses
            2
        """
        return self.num_distributed_processes

    def disable(self) -> _DistributedOptions:
        """Set the number of processes to one.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.disable().numProcesses
            1
        """
        return self.configureProcessId(0, 1)

    def configureProcessId(
        self, process_id: int, num_processes: int
    ) -> _DistributedOptions:
        """Set the index of this process and the number of processes.

        Any two integers are stored, whether they fit or not.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.configureProcessId(3, 4).processId
            3
        """
        return self._store(
            distributed_process_id=process_id, num_distributed_processes=num_processes
        )

    def setEnvVarNames(
        self, var_num_processes: str, var_process_id: str
    ) -> _DistributedOptions:
        """Read the number of processes and this one's index from the environment.

        Args:
            var_num_processes: Variable for the number of processes; 1 if unset.
            var_process_id: Variable for the index; 0 if unset.

        Raises:
            ValueError: If a variable doesn't hold an integer.

        Example:
            >>> import os
            >>> from ipufit.emulator import Options
            >>> os.environ.update(MY_SIZE="2", MY_RANK="1")
            >>> Options().Distributed.setEnvVarNames("MY_SIZE", "MY_RANK").processId
            1
            >>> del os.environ["MY_SIZE"], os.environ["MY_RANK"]
        """
        return self.configureProcessId(
            process_id=int(os.environ.get(var_process_id, "0")),
            num_processes=int(os.environ.get(var_num_processes, "1")),
        )


class TensorLocationSettings(OptionsDict):
    """Settings for where one kind of tensor is kept; a new object has none.

    Args:
        **values: First values, by the names in `repr`.

    Example:
        >>> from ipufit.emulator import Options, TensorLocationSettings
        >>> off_chip = TensorLocationSettings().useOnChipStorage(False)
        >>> options = Options()
        >>> _ = options.TensorLocations.setOptimizerLocation(off_chip)
        >>> options.TensorLocations.location_optimizer
        {'onChip': 0}
    """

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Keep tensors of fewer elements on the chip.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().minElementsForOffChip(4)
            TensorLocationSettings(minElementsForOffChip=4)
        """
        require_type("min_elements", min_elements, int)
        return self._store(minElementsForOffChip=min_elements)

    def minElementsForReplicatedTensorSharding(
        self, min_elements: int
    ) -> TensorLocationSettings:
        """Keep tensors of fewer elements whole, on every replica.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().minElementsForReplicatedTensorSharding(8)
            TensorLocationSettings(minElementsForReplicatedTensorSharding=8)
        """
        require_type("min_elements", min_elements, int)
        return self._store(minElementsForReplicatedTensorSharding=min_elements)

    def useOnChipStorage(self, use: bool | None = True) -> TensorLocationSettings:
        """Choose whether the tensors stay on the chip; None leaves it to PopART.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().useOnChipStorage().useOnChipStorage(None)
            TensorLocationSettings()
        """
        if use is None:
            self.deleteIfExists("onChip")
            return self
        return self._store_flag("onChip", use)

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Choose whether the tensors are spread over the replicas.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().useReplicatedTensorSharding()
            TensorLocationSettings(useReplicatedTensorSharding=1)
        """
        return self._store_flag("useReplicatedTensorSharding", use)

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        """Choose whether the tensors are loaded through the IO tiles.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().useIOTilesToLoad(False)
            TensorLocationSettings(useIOTilesToLoad=0)
        """
        return self._store_flag("useIOTilesToLoad", use)

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        """Choose whether the tensors are stored through the IO tiles.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().useIOTilesToStore()
            TensorLocationSettings(useIOTilesToStore=1)
        """
        return self._store_flag("useIOTilesToStore", use)

    def _store_flag(self, name: str, use: bool) -> TensorLocationSettings:
        require_type(name, use, bool)
        return self._store(**{name: int(use)})


def _location_setter(
    kind: str, what: str
) -> Callable[[_OptionsT, TensorLocationSettings], _OptionsT]:
    """Return a method that places tensors of a kind."""

    def set_location(self: _OptionsT, location: TensorLocationSettings) -> _OptionsT:
        name = f"location_{kind}"
        require_type(name, location, TensorLocationSettings)
        return self._store(**{name: location.toDict()})

    set_location.__name__ = f"set{kind.capitalize()}Location"
    set_location.__doc__ = f"Place the {what} as `location` says now."
    return set_location


class _TensorLocationOptions(OptionsDict):
    """`Options.TensorLocations`: settings for each kind of tensor."""

    def __init__(self) -> None:
        kinds = ("activation", "weight", "optimizer", "accumulator")
        super().__init__(**{f"location_{kind}": {} for kind in kinds})

    def numIOTiles(self, num_tiles: int) -> _TensorLocationOptions:
        """Reserve tiles of each IPU for transfers.

        Raises:
            AssertionError: If `num_tiles` isn't an even number from 32 to 192.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options()
            >>> _ = options.TensorLocations.numIOTiles(64)
        """
        require(
            isinstance(num_tiles, int) and num_tiles in range(32, 193, 2),
            f"numIOTiles must be an even number between 32 and 192. Got {num_tiles!r}.",
        )
        return self._store(numIOTiles=num_tiles)

    setActivationLocation = _location_setter("activation", "activations")
    setWeightLocation = _location_setter("weight", "weights")
    setOptimizerLocation = _location_setter("optimizer", "optimizer's state")
    setAccumulatorLocation = _location_setter("accumulator", "gradient accumulators")


class ConfigFileError(Exception):
    """Raised if a file given to `Options.loadFromFile` isn't valid Python.

    Example:
        >>> from ipufit.emulator import ConfigFileError
        >>> issubclass(ConfigFileError, Exception)
        True
    """


def _log_compilation_progress(progress: int, total: int) -> None:
    logger.debug("Graph compilation: %d/%d", progress, total)


class Options(OptionsDict):
    """Options for how a model is compiled and run (PopTorch user guide, "Options").

    Setters return the options, so that calls can be chained. Most of them raise
    `AssertionError` for an argument of another type than annotated. A data loader or
    a model freezes the options it is given: then setters raise `AttributeError`, and
    `clone` returns options that can be changed.

    New options read the environment: `POPTORCH_CACHE_DIR` (see
    `enableExecutableCaching`), `POPTORCH_DEFAULT_OPTIONS` (see `from_json`) and
    Open MPI's variables (see `Distributed`).

    Raises:
        json.JSONDecodeError: If `POPTORCH_DEFAULT_OPTIONS` is set, but not JSON.
        ValueError: If one of Open MPI's variables isn't an integer.

    Example:
        >>> from ipufit.emulator import Options, OutputMode
        >>> options = Options().deviceIterations(10).outputMode(OutputMode.All)
        >>> options.Training.gradientAccumulation(8).gradient_accumulation
        8
        >>> options.device_iterations
        10
    """

    # Absent until set.
    model_name: str
    use_model: bool
    ipu_id: int
    ipu_version: int
    random_seed: int

    def __init__(self) -> None:
        self.replication_factor = 1
        self.input_group_size = 1
        self.input_cgt = enums.CommGroupType.Consecutive
        self.broadcast_buffers = True
        self.device_iterations = 1
        self.log_dir = "."
        self.max_repeat_logs = 4
        self.auto_round_num_ipus = False
        self.anchored_tensors: dict[str, list[Any]] = {}
        # Plain integers, as PopTorch stores these.
        self.output_mode = enums.OutputMode.Default.value
        self.output_return_period = 1
        self.connection_type = enums.ConnectionType.Always.value
        self.sync_pattern = enums.SyncPattern.Full.value
        self.available_memory_proportion: dict[int, float] = {}

        self._popart = _PopartOptions()
        self._jit = _JitOptions()
        self._graphProcessing = _PrecisionOptions(self._popart)
        self._training = _TrainingOptions(self._popart)
        self._distributed = _DistributedOptions()
        self._tensor_locations = _TensorLocationOptions()
        self._execution_strategy: ExecutionStrategy = PipelinedExecution()
        self._source_location_excludes = [
            "install/poptorch",
            "site-packages/torch",
            "site-packages/poptorch",
        ]
        self._relax_optimizer_checks = False
        self._show_compilation_progress_bar = True
        self._module_namescope_enabled = True
        super().__init__()
        cache_dir = os.environ.get("POPTORCH_CACHE_DIR")
        if cache_dir:
            self.enableExecutableCaching(cache_dir)
        self.from_json(os.environ.get("POPTORCH_DEFAULT_OPTIONS", "{}"))

    @property
    def TensorLocations(self) -> _TensorLocationOptions:
        """Options for where tensors are kept.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().TensorLocations.numIOTiles(32)
        """
        return self._tensor_locations

    @property
    def Distributed(self) -> _DistributedOptions:
        """The index of this process, and the number of processes.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.disable().processId
            0
        """
        return self._distributed

    @property
    def Jit(self) -> _JitOptions:
        """Options for tracing with torch.jit, which are deprecated.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Jit.traceModel(False)
        """
        return self._jit

    @property
    def Precision(self) -> _PrecisionOptions:
        """Options for rounding, partial sums and floating-point traps.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Precision.enableStochasticRounding(True)
        """
        return self._graphProcessing

    @property
    def Training(self) -> _TrainingOptions:
        """Options for how gradients are accumulated and reduced.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Training.gradient_accumulation
            1
        """
        return self._training

    @property
    def _Popart(self) -> _PopartOptions:
        """Settings handed to PopART as they are."""
        return self._popart

    def deviceIterations(self, device_iterations: int) -> Options:
        """Set how many times the device runs its loop in one call.

        In training each iteration is one update of the weights. Any int is stored.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().deviceIterations(16).device_iterations
            16
        """
        return self._store(device_iterations=device_iterations)

    def replicationFactor(self, replication_factor: int) -> Options:
        """Set how many replicas of the model this process runs.

        Any int is stored.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().replicationFactor(4).replication_factor
            4
        """
        return self._store(replication_factor=replication_factor)

    def inputReplicaGrouping(
        self, input_group_size: int, input_group_type: enums.CommGroupType
    ) -> Options:
        """Feed the same inputs to every replica of a group.

        Call `replicationFactor` first: the sizes are compared here only.

        Args:
            input_group_size: Replicas in a group.
            input_group_type: `Consecutive` or `Orthogonal`. `NoGrouping` means
                groups of one, whatever the size.

        Raises:
            ValueError: If the type is `All`, or the size doesn't divide the
                replication factor.
            ZeroDivisionError: If the size is 0.
            AssertionError: If the type isn't a `CommGroupType`. The size is
                stored nevertheless.

        Example:
            >>> from ipufit.emulator import CommGroupType, Options
            >>> options = Options().replicationFactor(4)
            >>> options.inputReplicaGrouping(2, CommGroupType.Orthogonal).input_cgt.name
            'Orthogonal'
        """
        if input_group_type == enums.CommGroupType.NoGrouping:
            input_group_size, input_group_type = 1, enums.CommGroupType.Consecutive
        if input_group_type == enums.CommGroupType.All:
            raise ValueError(
                "CommGroupType.All isn't supported for inputs: group all "
                f"{self.replication_factor} replicas with CommGroupType.Consecutive."
            )
        replicas = self.replication_factor
        if replicas < input_group_size or replicas % input_group_size != 0:
            raise ValueError(
                f"{replicas} replicas can't be put into groups of {input_group_size}: "
                "the size must divide the replication factor."
            )
        return self._store(
            input_group_size=input_group_size, input_cgt=input_group_type
        )

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Options:
        """Reserve IPUs up to the next power of two; the added ones stay idle.

        Without it a pod refuses other numbers; the emulator does in strict mode only.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().autoRoundNumIPUs().auto_round_num_ipus
            True
        """
        return self._store(auto_round_num_ipus=auto_round_num_ipus)

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Options:
        """Choose whether all replicas share their buffers.

        A model with several replicas that changes a buffer compiles with False only:
        then each replica has its own.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().broadcastBuffers(False).broadcast_buffers
            False
        """
        return self._store(broadcast_buffers=broadcast_buffers)

    def setExecutionStrategy(self, strategy: ExecutionStrategy) -> Options:
        """Choose how blocks are spread over IPUs and time.

        The options keep the strategy itself; models work on a copy.

        Example:
            >>> from ipufit.emulator import Options, ShardedExecution
            >>> options = Options().setExecutionStrategy(ShardedExecution())
        """
        require(
            isinstance(strategy, ExecutionStrategy),
            "An execution strategy is a PipelinedExecution, ShardedExecution, "
            f"SerialPhasedExecution or ParallelPhasedExecution, not {strategy!r}.",
        )
        self._execution_strategy = strategy
        return self

    def setAvailableMemoryProportion(
        self, available_memory_proportion: dict[str, float]
    ) -> Options:
        """Limit the memory for temporary data of convolutions and matrix products.

        Args:
            available_memory_proportion: Proportion of each IPU's memory, above 0 and
                up to 1, `{"IPU0": 0.5}`; compiling refuses others. It replaces earlier
                proportions.

        Raises:
            AssertionError: If a key doesn't start with "IPU".
            ValueError: If no integer follows "IPU".
            AttributeError: If a key isn't a string.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().setAvailableMemoryProportion({"IPU1": 0.2})
            >>> options.available_memory_proportion
            {1: 0.2}
        """
        proportions = {}
        for name, proportion in available_memory_proportion.items():
            require(name.startswith("IPU"), f"Key {name!r}: use 'IPU0', 'IPU1', ...")
            proportions[int(name[len("IPU") :])] = proportion
        return self._store(available_memory_proportion=proportions)

    def outputMode(
        self, output_mode: enums.OutputMode, output_return_period: int | None = None
    ) -> Options:
        """Choose the micro-batches whose outputs a call returns.

        Args:
            output_mode: Any member; `Default` leaves the choice to the model.
            output_return_period: N of `OutputMode.EveryN`. With other modes it
                is stored, but has no effect.

        Raises:
            AssertionError: If `EveryN` comes without a positive period.

        Example:
            >>> from ipufit.emulator import Options, OutputMode
            >>> Options().outputMode(OutputMode.EveryN, 4).output_return_period
            4
        """
        require_type("output_mode", output_mode, enums.OutputMode)
        if output_mode is enums.OutputMode.EveryN:
            require(
                output_return_period and output_return_period > 0,
                "OutputMode.EveryN anchor must have a positive period, not "
                f"{output_return_period!r}: outputMode(OutputMode.EveryN, 2).",
            )
        elif output_return_period is not None:
            logger.info(
                "The output period %s is ignored: only OutputMode.EveryN has one.",
                output_return_period,
            )
        return self._store(
            output_mode=output_mode.value,
            output_return_period=output_return_period or 1,
        )

    def defaultOutputMode(self) -> bool:
        """Return whether the output mode is `Default`, so that the model decides.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().defaultOutputMode()
            True
        """
        return self.output_mode == enums.OutputMode.Default

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: enums.OutputMode | None = None,
        output_return_period: int = 1,
    ) -> None:
        """Make calls return a tensor from inside the model too.

        As in PopTorch, this works on frozen options and checks nothing; compiling
        refuses names that the model doesn't have. Neither mode nor period has an
        effect: anchored tensors come back as the outputs do.

        Args:
            short_name: Name for `PoplarExecutor.getAnchoredTensor`.
            long_name: Name inside the model, one of `PoplarExecutor.getTensorNames`.
            output_mode: Stored only; None stands for that of the outputs.
            output_return_period: Stored only; 1 without `OutputMode.EveryN`.

        Example:
            >>> from ipufit.emulator import Options, OutputMode
            >>> options = Options()
            >>> options.anchorTensor("grad", "Gradient___fc.weight", OutputMode.All, 3)
            >>> options.anchored_tensors["grad"][1:]
            [False, <OutputMode.All: 2>, 1]
        """
        period = output_return_period if output_mode == enums.OutputMode.EveryN else 1
        anchor = [long_name, output_mode is None, output_mode, period]
        self.anchored_tensors[short_name] = anchor

    def randomSeed(self, random_seed: int) -> Options:
        """Seed torch at once, and the device and shared shuffling when they start.

        As in PopTorch, torch is seeded even if the options are frozen.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().randomSeed(42).random_seed
            42
        """
        require_type("random_seed", random_seed, int)
        torch.manual_seed(random_seed)
        return self._store(random_seed=random_seed)

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Options:
        """Choose whether unused attributes of an optimizer are accepted silently.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().relaxOptimizerAttributesChecks()
        """
        self._relax_optimizer_checks = relax
        return self

    def enableStableNorm(self, enabled: bool) -> Options:
        """Choose whether normalisations compute variances in two stable steps.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().enableStableNorm(True)
        """
        return self._set_popart("enableStableNorm", enabled)

    def updatableNamedBuffers(self, buffers: list[str]) -> Options:
        """Name the module's buffers that the host may change after compiling.

        `PoplarExecutor.copyNamedBuffersToDevice` uploads them.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().updatableNamedBuffers(["norm.running_mean"])
        """
        return self._set_popart("updatableNamedBuffers", buffers)

    def connectionType(self, connection_type: enums.ConnectionType) -> Options:
        """Choose when models attach to the device.

        Example:
            >>> from ipufit.emulator import ConnectionType, Options
            >>> Options().connectionType(ConnectionType.OnDemand).connection_type
            1
        """
        require_type("connection_type", connection_type, enums.ConnectionType)
        return self._store(connection_type=connection_type.value)

    def syncPattern(self, sync_pattern: enums.SyncPattern) -> Options:
        """Choose which IPUs wait for each other.

        Example:
            >>> from ipufit.emulator import Options, SyncPattern
            >>> Options().syncPattern(SyncPattern.SinglePipeline).sync_pattern
            1
        """
        require_type("sync_pattern", sync_pattern, enums.SyncPattern)
        return self._store(sync_pattern=sync_pattern.value)

    def useIpuId(self, ipu_id: int) -> Options:
        """Choose one device by its number, as `gc-info` lists it.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().useIpuId(7).ipu_id
            7
        """
        require_type("ipu_id", ipu_id, int)
        return self._store(ipu_id=ipu_id)

    def useIpuModel(self, use_model: bool) -> Options:
        """Choose whether to run on Graphcore's simulator.

        The environment has no say then. The emulator emulates no pod: no IPUs are
        reserved or scarce, and their number needn't be a power of two, even in strict
        mode.

        Raises:
            AssertionError: If a second value has another type than the first.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().useIpuModel(True).use_model
            True
        """
        return self._store(use_model=use_model)

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Options:
        """Compile for a kind of IPU without having one.

        It implies `ConnectionType.Never`.

        Args:
            ipu_version: 1, 2 or 21, unchecked.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().useOfflineIpuTarget(21)
            >>> options.connection_type, options.ipu_version
            (2, 21)
        """
        self.connectionType(enums.ConnectionType.Never)
        return self._store(ipu_version=ipu_version)

    def enableExecutableCaching(self, path: str | None) -> Options:
        """Keep compiled executables in a directory, on a pod.

        The emulator keeps none, and logs that at level INFO: it compiles by
        tracing, which has to run the module's Python every time.

        Args:
            path: Directory; None turns caching off.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().enableExecutableCaching("cache")
            >>> options._Popart.options["cachePath"]
            'cache'
        """
        self._popart.set("enableEngineCaching", path is not None)
        if path is not None:
            self._popart.set("cachePath", path)
        return self

    def enableSyntheticData(self, enabled: bool) -> Options:
        """Choose whether to run without any transfer from or to the host.

        The device then draws its inputs itself. Outputs are zeros of the right shape;
        in PopTorch their values are undefined.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().enableSyntheticData(True)
        """
        random_normal, off = 2, 0  # members of PopART's `SyntheticDataMode`
        return self._set_popart("syntheticDataMode", random_normal if enabled else off)

    def logDir(self, log_dir: str) -> Options:
        """Choose the directory that logs are written to.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().logDir("logs").log_dir
            'logs'
        """
        return self._store(log_dir=log_dir)

    def maxRepeatLogs(self, max_lines: int | None) -> Options:
        """Limit how often the same line is logged.

        Args:
            max_lines: None for no limit, stored as 2**64 - 1.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().maxRepeatLogs(2).max_repeat_logs
            2
        """
        return self._store(
            max_repeat_logs=2**64 - 1 if max_lines is None else max_lines
        )

    def modelName(self, name: str) -> Options:
        """Name the model in profiles; by default "training" or "inference".

        Raises:
            AssertionError: If a second name has another type than the first.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().modelName("net").model_name
            'net'
        """
        return self._store(model_name=name)

    def enableProfiling(self, profile_dir: str | None = None) -> Options:
        """Have Poplar write profiles to a directory, by default the working one.

        The engine options for it are added to those already set.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().enableProfiling("profile")
            >>> options._Popart.options["engineOptions"]["autoReport.directory"]
            'profile'
        """
        engine_options = {
            "debug.allowOutOfMemory": "true",
            "autoReport.directory": profile_dir or ".",
            "autoReport.all": "true",
        }
        environment = os.environ.get("POPLAR_ENGINE_OPTIONS", "")
        overridden = [name for name in engine_options if name in environment]
        if overridden:
            logger.warning(
                "POPLAR_ENGINE_OPTIONS overrides what enableProfiling sets: %s.",
                ", ".join(overridden),
            )
        earlier = self._popart.options.get("engineOptions", {})
        self._popart.setEngineOptions({**earlier, **engine_options})
        return self

    def logCycleCount(self, log_cycle_count: bool) -> Options:
        """Choose whether to count the cycles of each call, on hardware only.

        `PoplarExecutor.cycleCount` returns the last count.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().logCycleCount(True)
        """
        return self._set_popart("instrumentWithHardwareCycleCounter", log_cycle_count)

    def showCompilationProgressBar(self, show: bool = True) -> Options:
        """Choose whether compiling shows a progress bar.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().showCompilationProgressBar(False)
        """
        self._show_compilation_progress_bar = show
        return self

    def sourceLocationExcludes(self, excludes: list[str]) -> Options:
        """Replace the paths that the search for an operation's source line skips.

        Args:
            excludes: Parts of paths.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().sourceLocationExcludes(["site-packages/torch"])
        """
        self._source_location_excludes = excludes
        return self

    def appendToLocationExcludes(self, *excludes: str) -> Options:
        """Add paths that the search for an operation's source line skips.

        Args:
            excludes: Parts of paths.

        Raises:
            AttributeError: If the options are frozen. As in PopTorch, the paths
                are added nevertheless.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().appendToLocationExcludes("my_layers")
        """
        self._source_location_excludes.extend(excludes)
        self.checkIsFrozen()
        return self

    def disableModuleNamescope(self) -> Options:
        """Leave the modules' names out of those of operations.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().disableModuleNamescope()
        """
        self._module_namescope_enabled = False
        return self

    def from_json(self, string: str) -> Options:
        """Call the setters that a JSON object names.

        Args:
            string: Maps dotted names of setters to arguments. A list holds several
                arguments; `"OutputMode.All"`, outside a list, becomes the member.

        Raises:
            json.JSONDecodeError: If `string` isn't JSON.
            AttributeError: If there is no such setter.
            TypeError: If a name is that of a value instead of a setter.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().from_json(
            ...     '{"outputMode": "OutputMode.All", "deviceIterations": 3}'
            ... )
            >>> options.device_iterations
            3
        """
        for accessor, value in json.loads(string).items():
            class_name, _, member_name = str(value).partition(".")
            members = getattr(getattr(enums, class_name, None), "__members__", {})
            arguments = (
                value if isinstance(value, list) else [members.get(member_name, value)]
            )
            attrgetter(accessor)(self)(*arguments)
        return self

    def loadFromFile(self, filepath: str) -> Options:
        r"""Call the setters that a file lists, one per line.

        The file is executed as Python: use only files you trust.

        Args:
            filepath: Path of a file with lines such as `deviceIterations(5)` or
                `outputMode(poptorch.OutputMode.All)`. Lines that are blank or start
                with `#` are skipped.

        Raises:
            ConfigFileError: If a line isn't valid Python.
            FileNotFoundError: If there is no such file.

        Example:
            >>> import os, tempfile
            >>> from ipufit.emulator import Options
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = os.path.join(folder, "run.cfg")
            ...     with open(path, "w") as file:
            ...         _ = file.write("# short run\ndeviceIterations(5)\n")
            ...     Options().loadFromFile(path).device_iterations
            5
        """
        with open(filepath, encoding="utf-8") as file:
            kept = [line.strip() for line in file]
        lines = [f"options.{line}" for line in kept if line and line[0] != "#"]
        # The settings name enumerations as scripts do: `poptorch.OutputMode.All`.
        script = "\n".join(["import ipufit.emulator as poptorch", *lines])
        try:
            exec(script, {"options": self})
        except SyntaxError as error:
            # The first line is ours, and an error can be one line past the end. Blank
            # lines and comments aren't counted, as in PopTorch.
            number = min(max((error.lineno or 2) - 1, 1), len(lines))
            raise ConfigFileError(
                f"SyntaxError at line {number} of {os.path.basename(filepath)}: "
                f"{error.msg}\n> {lines[number - 1]}"
            ) from error
        return self

    def toDict(self) -> dict[str, Any]:
        """Merge all settings into a dict for the backend.

        Returns:
            Values by name: of the strategy, `_Popart`, these options and their
            sections, in this order. `_Popart` overrides the strategy.

        Raises:
            AssertionError: If the output mode is still `Default`, or a name
                occurs twice.

        Example:
            >>> from ipufit.emulator import Options, OutputMode
            >>> Options().outputMode(OutputMode.Final).toDict()["execution_mode"]
            0
        """
        require(
            not self.defaultOutputMode(),
            "An output mode must be picked first: outputMode(OutputMode.All).",
        )
        merged = {**self._execution_strategy.backendOptions(), **self._popart.options}
        for part in (self, self._training, self._distributed, self._tensor_locations):
            part.update(merged)
        if self._show_compilation_progress_bar:
            merged["compilation_progress_bar_fn"] = _log_compilation_progress
        return merged

    def clone(self) -> Options:
        """Copy the options, strategy and sections included, into unfrozen ones.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().replicationFactor(2)
            >>> options.clone().replicationFactor(4).replication_factor
            4
            >>> options.replication_factor
            2
        """
        return copy.deepcopy(self)

    def _shown(self) -> dict[str, Any]:
        kind = type(self)
        sections = (k for k in dir(kind) if isinstance(getattr(kind, k), property))
        return {**self._values, **{name: getattr(self, name) for name in sections}}


_LOSS_SCALING = "automaticLossScalingSettings."


class Settings:
    """Settings of `Options._Popart` by plain names, read when a model is wrapped.

    Args:
        options: The options to read.

    Attributes:
        cache_dir: Folder for compiled executables; None without a cache.
        counts_cycles: Whether `cycleCount` has a value (`Options.logCycleCount`).
        is_ipu_model: Whether the device is the IPU Model, which neither rounds
            stochastically nor stops at exceptions (PopART, `irlowering.cpp`).
        is_synthetic: Whether the device makes its own inputs, and transfers nothing.
        rounds_at_random: Whether float16 is rounded stochastically.
        stops_at_exceptions: Whether a floating-point exception stops a call.
        updatable_buffers: Names that `Options.updatableNamedBuffers` was given.
        scales_loss: Whether PopART adapts the loss scaling.
        loss_scaling_bin_edge: Share of the largest float16; a larger gradient is too
            large.
        loss_scaling_proportion: Share of too large gradients above which the loss
            scaling is halved.
        loss_scaling_period: Number of updates between two changes of the loss scaling.

    Example:
        >>> Settings(Options().enableExecutableCaching("cache")).cache_dir
        'cache'
        >>> Settings(Options().enableSyntheticData(True)).is_synthetic
        True
    """

    def __init__(self, options: Options) -> None:
        popart = options._Popart.options
        folder = popart.get("cachePath") if popart.get("enableEngineCaching") else None
        self.cache_dir = None if folder is None else str(folder)
        self.counts_cycles = bool(popart["instrumentWithHardwareCycleCounter"])
        self.is_synthetic = bool(popart.get("syntheticDataMode"))
        is_chosen = options.exists("use_model")  # else the environment decides
        self.is_ipu_model = bool(options.use_model) if is_chosen else ipu_model_is_on()
        is_real = not self.is_ipu_model
        self.rounds_at_random = is_real and bool(popart.get("enableStochasticRounding"))
        checks = bool(popart.get("enableFloatingPointChecks"))
        self.stops_at_exceptions = is_real and checks
        self.updatable_buffers: Sequence[str] = popart.get("updatableNamedBuffers", ())
        self.scales_loss = bool(popart.get(f"{_LOSS_SCALING}enabled"))
        self.loss_scaling_bin_edge: float = popart.get(
            f"{_LOSS_SCALING}binEdgeLocation", 0.125
        )
        self.loss_scaling_proportion: float = popart.get(
            f"{_LOSS_SCALING}thresholdUpperCountProportion", 1e-7
        )
        period: int = popart.get(f"{_LOSS_SCALING}updatePeriod", 1)
        self.loss_scaling_period = max(1, period)  # PopART takes 0 for 1


class Attribute:
    """Attach attributes to the operators inside, for a device's compiler.

    Args:
        **attributes: Name of an attribute to its keys and values, all strings.

    Example:
        >>> with Attribute(__outline={"layer": "embedding"}):
        ...     torch.tensor([1.0]) + 1
        tensor([2.])
    """

    def __init__(self, **attributes: dict[str, str]) -> None:
        """Take attributes, and leave them to a device's compiler."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *exception: object) -> None:
        """Do nothing, too."""


__all__ = [
    "Attribute",
    "BlockId",
    "ConfigFileError",
    "Options",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "TensorLocationSettings",
]
