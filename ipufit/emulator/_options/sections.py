# SPDX-License-Identifier: Apache-2.0
"""The sections `Options.Training`, `Precision` and `Jit`.

`Training` and `Precision` write some settings into the options' `_Popart`.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import torch

from ipufit.emulator._ground.checks import require
from ipufit.emulator._options.popart import _PopartOptions
from ipufit.emulator._options.storage import OptionsDict
from ipufit.emulator.enums import MeanReductionStrategy, ReductionType

logger = logging.getLogger("poptorch::python")

_TrainingT = TypeVar("_TrainingT", bound="_TrainingOptions")
_PrecisionT = TypeVar("_PrecisionT", bound="_PrecisionOptions")
_JitT = TypeVar("_JitT", bound="_JitOptions")


class _TrainingOptions(OptionsDict):
    """`Options.Training`: how gradients are accumulated and reduced."""

    gradient_accumulation: int
    accumulation_and_replication_reduction_type: ReductionType
    meanAccumulationAndReplicationReductionStrategy: MeanReductionStrategy
    _popart: _PopartOptions

    def __init__(self, popart_options: _PopartOptions) -> None:
        super().__init__(
            {
                "gradient_accumulation": 1,
                "accumulation_and_replication_reduction_type": ReductionType.Mean,
                "meanAccumulationAndReplicationReductionStrategy": (
                    MeanReductionStrategy.Post
                ),
            },
            _popart=popart_options,
        )

    def gradientAccumulation(
        self: _TrainingT, gradient_accumulation: int
    ) -> _TrainingT:
        """Add up the gradients of several micro-batches before each update.

        Args:
            gradient_accumulation: Micro-batches per update and replica.

        Returns:
            The section.

        Raises:
            AssertionError: If it isn't an int.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options()
            >>> options.Training.gradientAccumulation(4).gradient_accumulation
            4
        """
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(
        self: _TrainingT, reduction_type: ReductionType
    ) -> _TrainingT:
        """Average or add the gradients of micro-batches and replicas.

        `Mean` divides by gradient accumulation times replicas, whatever the
        reduction of the loss.

        Args:
            reduction_type: `ReductionType.Mean` or `ReductionType.Sum`.

        Returns:
            The section.

        Raises:
            ValueError: If it is neither.

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
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(
        self: _TrainingT, mean_reduction_strategy: MeanReductionStrategy
    ) -> _TrainingT:
        """Choose when a mean of gradients is divided.

        Args:
            mean_reduction_strategy: `Post` or `Running`. `PostAndLoss` is
                accepted here and refused when compiling.

        Returns:
            The section.

        Raises:
            AssertionError: If it isn't a `MeanReductionStrategy`.

        Example:
            >>> from ipufit.emulator import MeanReductionStrategy, Options
            >>> training = Options().Training
            >>> _ = training.setMeanAccumulationAndReplicationReductionStrategy(
            ...     MeanReductionStrategy.Running
            ... )
        """
        self.set(
            meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy
        )
        return self

    def setAutomaticLossScaling(self: _TrainingT, enabled: bool) -> _TrainingT:
        """Let PopART adapt the loss scaling.

        Args:
            enabled: Whether to.

        Returns:
            The section.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Training.setAutomaticLossScaling(True)
        """
        self._popart.set("automaticLossScalingSettings.enabled", enabled)
        return self

    def setConvolutionDithering(self: _TrainingT, enabled: bool) -> _TrainingT:
        """Start convolutions on different tiles.

        As in PopTorch, this replaces every other convolution option, that of
        `Precision.setPartialsType` included.

        Args:
            enabled: Whether to.

        Returns:
            The section.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Training.setConvolutionDithering(True)
        """
        self._popart.set("convolutionOptions", {"enableConvDithering": enabled})
        return self


class _PrecisionOptions(OptionsDict):
    """`Options.Precision`: rounding, partial sums and floating-point traps."""

    _popart: _PopartOptions

    def __init__(self, popart_options: _PopartOptions) -> None:
        super().__init__({}, _popart=popart_options)

    def enableFloatingPointExceptions(self: _PrecisionT, enabled: bool) -> _PrecisionT:
        """Stop on invalid operations, division by zero and overflow.

        Args:
            enabled: Whether to.

        Returns:
            The section.

        Raises:
            AssertionError: If `enabled` isn't a bool.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Precision.enableFloatingPointExceptions(True)
        """
        require(isinstance(enabled, bool), f"`enabled` must be a bool: {enabled!r}.")
        self._popart.set("enableFloatingPointChecks", enabled)
        return self

    def enableStochasticRounding(self: _PrecisionT, enabled: bool) -> _PrecisionT:
        """Round half precision at random.

        Args:
            enabled: Whether to.

        Returns:
            The section.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Precision.enableStochasticRounding(True)
        """
        self._popart.set("enableStochasticRounding", enabled)
        return self

    def setPartialsType(self: _PrecisionT, dtype: torch.dtype) -> _PrecisionT:
        """Choose the type of partial sums in products and convolutions.

        As in PopTorch, this replaces every other convolution option, that of
        `Training.setConvolutionDithering` included.

        Args:
            dtype: `torch.float` or `torch.half`.

        Returns:
            The section.

        Raises:
            ValueError: If it is neither.

        Example:
            >>> import torch
            >>> from ipufit.emulator import Options
            >>> options = Options()
            >>> _ = options.Precision.setPartialsType(torch.half)
            >>> options._Popart.options["partialsTypeMatMuls"]
            'half'
        """
        if dtype == torch.float:
            name = "float"
        elif dtype == torch.half:
            name = "half"
        else:
            raise ValueError(f"Partials are torch.float or torch.half, not {dtype!r}.")
        self._popart.set("partialsTypeMatMuls", name)
        self._popart.set("convolutionOptions", {"partialsType": name})
        return self

    def halfFloatCasting(self: _PrecisionT, half_float_casting: Any) -> _PrecisionT:
        """Warn that this does nothing any more: mixed operands become float.

        Args:
            half_float_casting: Ignored.

        Returns:
            The section.

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
        """Warn that this does nothing any more.

        Args:
            value: Ignored.

        Returns:
            The section.

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
    """`Options.Jit`: what is left of tracing with torch.jit."""

    def __init__(self) -> None:
        super().__init__({})

    def traceModel(self: _JitT, trace_model: bool) -> _JitT:
        """Warn that models can't be traced with torch.jit any more.

        Args:
            trace_model: False, or nothing can be done.

        Returns:
            The section.

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
