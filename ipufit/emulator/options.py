# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401 - PopTorch keeps the classes of sections here, and PopDist needs them
"""`poptorch.options`: options, and the execution strategies they take."""

from __future__ import annotations

from ipufit.emulator._ops.markers import Attribute
from ipufit.emulator._options.distributed import _DistributedOptions
from ipufit.emulator._options.from_text import ConfigFileError
from ipufit.emulator._options.options import Options
from ipufit.emulator._options.popart import _PopartOptions
from ipufit.emulator._options.sections import (
    _JitOptions,
    _PrecisionOptions,
    _TrainingOptions,
)
from ipufit.emulator._options.stages import BlockId, Stage
from ipufit.emulator._options.strategies import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
)
from ipufit.emulator._options.tensor_locations import (
    TensorLocationSettings,
    _TensorLocationOptions,
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
