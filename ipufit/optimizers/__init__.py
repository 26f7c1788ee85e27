# SPDX-License-Identifier: Apache-2.0
"""Optimizers, learning rates, loss scaling, averages of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ipufit.errors import unknown_attribute

from .averaging import WeightAverage
from .optimizer import (
    Frozen,
    Optimization,
    Optimizer,
    OptimizerLike,
    WeightState,
    check_covers,
    freeze,
    is_norm,
    resolve_optimization,
    resolve_optimizer,
    weight_states,
)
from .schedule import LossScaleRamp, PerEpoch, Schedule, ScheduleLike, SchedulesLike
from .values import OptimizerValues

__all__ = [
    "Frozen",
    "LossScaleRamp",
    "Optimization",
    "Optimizer",
    "OptimizerLike",
    "OptimizerValues",
    "PerEpoch",
    "Schedule",
    "ScheduleLike",
    "SchedulesLike",
    "WeightAverage",
    "WeightState",
    "check_covers",
    "freeze",
    "is_norm",
    "resolve_optimization",
    "resolve_optimizer",
    "weight_states",
]

if not TYPE_CHECKING:  # checkers find unknown names by themselves

    def __getattr__(name: str) -> Any:
        raise unknown_attribute(f"module {__name__!r}", "ipufit", name, __all__)
