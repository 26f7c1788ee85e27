# SPDX-License-Identifier: Apache-2.0
"""Optimisers, learning rates, loss scaling, averages of weights."""

from __future__ import annotations

from .averaging import WeightAverage
from .optimization import Optimization, resolve_optimization
from .optimizer import (
    Optimizer,
    OptimizerLike,
    WeightState,
    hyper_parameters,
    resolve_optimizer,
    weight_states,
)
from .parameters import Frozen, check_covers, freeze, is_norm
from .scaling import LossScaleRamp
from .schedule import PerEpoch, Schedule, ScheduleLike, SchedulesLike

__all__ = [
    "Frozen",
    "LossScaleRamp",
    "Optimization",
    "Optimizer",
    "OptimizerLike",
    "PerEpoch",
    "Schedule",
    "ScheduleLike",
    "SchedulesLike",
    "WeightAverage",
    "WeightState",
    "check_covers",
    "freeze",
    "hyper_parameters",
    "is_norm",
    "resolve_optimization",
    "resolve_optimizer",
    "weight_states",
]
