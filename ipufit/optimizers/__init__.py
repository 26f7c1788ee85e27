# SPDX-License-Identifier: Apache-2.0
"""Optimisers, learning rates, loss scaling, averages of weights."""

from __future__ import annotations

from .averaging import WeightAverage
from .loss_scaling import LossScaleRamp
from .rates import ScheduleLike
from .resolve import (
    OptimizerLike,
    check_covers,
    hyper_parameters,
    resolve_optimizer,
)
from .schedules import Schedule
from .spec import Optimizer
from .optimization import Updates, resolve_updates

__all__ = [
    "LossScaleRamp",
    "Optimizer",
    "OptimizerLike",
    "Schedule",
    "ScheduleLike",
    "Updates",
    "WeightAverage",
    "check_covers",
    "hyper_parameters",
    "resolve_optimizer",
    "resolve_updates",
]
