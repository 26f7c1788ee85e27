# SPDX-License-Identifier: Apache-2.0
"""The sections `Options.Training`, `Precision` and `Jit`.

`Training` and `Precision` store some of their settings in `Options._Popart`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ipufit.emulator._ground.checks import require_type
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._options.popart import _PopartOptions
from ipufit.emulator._options.storage import OptionsDict
from ipufit.emulator.enums import MeanReductionStrategy, ReductionType

_TrainingT = TypeVar("_TrainingT", bound="_TrainingOptions")
_PrecisionT = TypeVar("_PrecisionT", bound="_PrecisionOptions")
_JitT = TypeVar("_JitT", bound="_JitOptions")


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

    def gradientAccumulation(
        self: _TrainingT, gradient_accumulation: int
    ) -> _TrainingT:
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
        self: _TrainingT, reduction_type: ReductionType
    ) -> _TrainingT:
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
        self: _TrainingT, mean_reduction_strategy: MeanReductionStrategy
    ) -> _TrainingT:
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

    def setAutomaticLossScaling(self: _TrainingT, enabled: bool) -> _TrainingT:
        """Choose whether PopART adapts the loss scaling.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Training.setAutomaticLossScaling(True)
        """
        self._popart.set("automaticLossScalingSettings.enabled", enabled)
        return self

    def setConvolutionDithering(self: _TrainingT, enabled: bool) -> _TrainingT:
        """Choose whether convolutions start on different tiles.

        As in PopTorch, this replaces every other option of convolutions, such as that
        of `Precision.setPartialsType`.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Training.setConvolutionDithering(True)
        """
        self._popart.set("convolutionOptions", {"enableConvDithering": enabled})
        return self


class _PrecisionOptions(OptionsDict):
    """`Options.Precision`: rounding, partial sums and floating-point traps."""

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart = popart_options
        super().__init__()

    def enableFloatingPointExceptions(self: _PrecisionT, enabled: bool) -> _PrecisionT:
        """Choose whether invalid operations, division by zero and overflow stop a call.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Precision.enableFloatingPointExceptions(True)
        """
        require_type("enabled", enabled, bool)
        self._popart.set("enableFloatingPointChecks", enabled)
        return self

    def enableStochasticRounding(self: _PrecisionT, enabled: bool) -> _PrecisionT:
        """Choose whether half precision is rounded at random.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Precision.enableStochasticRounding(True)
        """
        self._popart.set("enableStochasticRounding", enabled)
        return self

    def setPartialsType(self: _PrecisionT, dtype: torch.dtype) -> _PrecisionT:
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
        self._popart.set("convolutionOptions", {"partialsType": name})
        return self

    def halfFloatCasting(self: _PrecisionT, half_float_casting: Any) -> _PrecisionT:
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

    def runningStatisticsAlwaysFloat(self: _PrecisionT, value: bool) -> _PrecisionT:
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

    def traceModel(self: _JitT, trace_model: bool) -> _JitT:
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
