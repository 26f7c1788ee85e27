# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401 - PopTorch keeps the classes of sections here, and PopDist needs them
"""`poptorch.options`: options, and the execution strategies they take."""

from __future__ import annotations

from ipufit.emulator._ops.markers import Attribute
from ipufit.emulator._options.options import (
    ConfigFileError,
    Options,
    TensorLocationSettings,
    _DistributedOptions,
    _JitOptions,
    _PopartOptions,
    _PrecisionOptions,
    _TensorLocationOptions,
    _TrainingOptions,
)
from ipufit.emulator._options.strategies import (
    BlockId,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)

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
