# SPDX-License-Identifier: Apache-2.0
"""Options that the emulator reads while it compiles and runs a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

from ipufit.emulator._options.options import Options

_LOSS_SCALING = "automaticLossScalingSettings."


@dataclass(frozen=True)
class Settings:
    """Settings of `Options._Popart` under plain names, read when a model is wrapped.

    Attributes:
        cache_dir: Folder for compiled executables; None without a cache.
        counts_cycles: Whether `cycleCount` has a value (`Options.logCycleCount`).
        is_synthetic: Whether the device makes its own inputs, and sends nothing.
        rounds_at_random: Whether float16 is rounded stochastically.
        stops_at_exceptions: Whether a floating-point exception stops a call.
        updatable_buffers: Names that `Options.updatableNamedBuffers` was given.
        scales_loss: Whether PopART adapts the loss scaling.
        loss_scaling_bin_edge: Gradients above this share of the largest float16 are
            too large.
        loss_scaling_proportion: Share of too large gradients at which the loss scaling
            is halved.
        loss_scaling_period: Number of updates between two changes of it.

    Example:
        >>> Settings.of(Options().enableExecutableCaching("cache")).cache_dir
        'cache'
        >>> Settings.of(Options().enableSyntheticData(True)).is_synthetic
        True
    """

    cache_dir: str | None
    counts_cycles: bool
    is_synthetic: bool
    rounds_at_random: bool
    stops_at_exceptions: bool
    updatable_buffers: Sequence[str]
    scales_loss: bool
    loss_scaling_bin_edge: float
    loss_scaling_proportion: float
    loss_scaling_period: int

    @classmethod
    def of(cls, options: Options) -> Settings:
        """Read the settings off the options."""
        popart = options._Popart.options
        folder = popart.get("cachePath") if popart.get("enableEngineCaching") else None
        return cls(
            cache_dir=None if folder is None else str(folder),
            counts_cycles=bool(popart["instrumentWithHardwareCycleCounter"]),
            is_synthetic=bool(popart.get("syntheticDataMode")),
            rounds_at_random=bool(popart.get("enableStochasticRounding")),
            stops_at_exceptions=bool(popart.get("enableFloatingPointChecks")),
            updatable_buffers=popart.get("updatableNamedBuffers", ()),
            scales_loss=bool(popart.get(f"{_LOSS_SCALING}enabled")),
            loss_scaling_bin_edge=popart.get(f"{_LOSS_SCALING}binEdgeLocation", 0.125),
            loss_scaling_proportion=popart.get(
                f"{_LOSS_SCALING}thresholdUpperCountProportion", 1e-7
            ),
            loss_scaling_period=popart.get(f"{_LOSS_SCALING}updatePeriod", 1),
        )
