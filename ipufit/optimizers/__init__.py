# SPDX-License-Identifier: Apache-2.0
"""Optimisers, learning rates, loss scaling, averages of weights."""

from __future__ import annotations

from .averaging import WeightAverage
from .loss_scaling import LossScaleRamp
from .optimization import Optimization, resolve_optimization
from .rates import ScheduleLike
from .resolve import (
    OptimizerLike,
    check_covers,
    hyper_parameters,
    resolve_optimizer,
)
from .schedules import Schedule
from .spec import Optimizer

__all__ = [
    "LossScaleRamp",
    "Optimization",
    "Optimizer",
    "OptimizerLike",
    "Schedule",
    "ScheduleLike",
    "WeightAverage",
    "check_covers",
    "hyper_parameters",
    "resolve_optimization",
    "resolve_optimizer",
]
