# SPDX-License-Identifier: Apache-2.0
"""Optimisers, learning rates, loss scaling, averages of weights."""

from __future__ import annotations

from .averaging import WeightAverage
from .decay import is_norm
from .freezing import Frozen, freeze
from .loss_scaling import LossScaleRamp
from .optimization import Optimization, resolve_optimization
from .resolve import (
    OptimizerLike,
    check_covers,
    hyper_parameters,
    resolve_optimizer,
)
from .resolve_rates import ScheduleLike, SchedulesLike
from .schedules import Schedule
from .spec import Optimizer
from .torch_rates import PerEpoch

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
    "check_covers",
    "freeze",
    "hyper_parameters",
    "is_norm",
    "resolve_optimization",
    "resolve_optimizer",
]
