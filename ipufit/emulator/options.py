# SPDX-License-Identifier: Apache-2.0
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
from ipufit.emulator._options.strategies import (
    BlockId,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from ipufit.emulator._options.tensor_locations import (
    TensorLocationSettings,
    _TensorLocationOptions,
)

# PopTorch keeps all of these here; PopDist subclasses the sections.
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
    "_DistributedOptions",
    "_JitOptions",
    "_PopartOptions",
    "_PrecisionOptions",
    "_TensorLocationOptions",
    "_TrainingOptions",
]
