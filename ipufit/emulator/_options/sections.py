# SPDX-License-Identifier: Apache-2.0
"""Base classes of options, and the sections of `Options`.

Options keep the type of each value. They can be frozen and copied. `Training` and
`Precision` store some settings in `Options._Popart`.
"""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any, Callable, TypeVar

import torch

from ipufit.emulator._ground.logging import logger
from ipufit.emulator.enums import MeanReductionStrategy, ReductionType
from ipufit.emulator.errors import require, require_type

_FreezableT = TypeVar("_FreezableT", bound="Freezable")
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

    def _freeze(self) -> None:
        self._set_frozen(True)

    def _unfreeze(self) -> None:
        self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        self.__dict__["_is_frozen"] = frozen
        for part in self.__dict__.values():
            if isinstance(part, Freezable):
                part._set_frozen(frozen)

    def __deepcopy__(self: _FreezableT, memo: dict[int, Any]) -> _FreezableT:
        duplicate = self.__class__.__new__(self.__class__)
        for name, value in self.__dict__.items():
            duplicate.__dict__[name] = copy.deepcopy(value, memo)
        duplicate.__dict__["_is_frozen"] = False
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
        self.accumulation_and_replication_reduction_type = ReductionType.Mean
        self.meanAccumulationAndReplicationReductionStrategy = (
            MeanReductionStrategy.Post
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
        self, reduction_type: ReductionType
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
        if not isinstance(reduction_type, ReductionType) or (
            reduction_type is ReductionType.NoReduction
        ):
            raise ValueError(
                "Gradients are reduced by ReductionType.Mean or ReductionType.Sum, "
                f"not {reduction_type!r}."
            )
        return self._store(accumulation_and_replication_reduction_type=reduction_type)

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
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
        names = {torch.float: "float", torch.half: "half"}
        if dtype not in names:
            raise ValueError(f"Partials are torch.float or torch.half, not {dtype!r}.")
        name = names[dtype]
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

    def __init__(self) -> None:
        super().__init__()

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
        self.location_activation: dict[str, int] = {}
        self.location_weight: dict[str, int] = {}
        self.location_optimizer: dict[str, int] = {}
        self.location_accumulator: dict[str, int] = {}
        super().__init__()

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
    setOptimizerLocation = _location_setter("optimizer", "optimiser's state")
    setAccumulatorLocation = _location_setter("accumulator", "gradient accumulators")
