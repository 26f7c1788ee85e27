# SPDX-License-Identifier: Apache-2.0
"""PopTorch's public API on the host: `import ipufit.emulator as poptorch`.

It keeps PopTorch 3.4's contract, not only its names: `forward` is traced once,
inputs are cut `[D, G, R, B]`, weights live on an emulated device until they are
copied, options freeze, and what a pod would refuse is refused here. The numbers are
those of torch on this machine's processor.
"""

from __future__ import annotations

import torch  # noqa: F401 - PopTorch has it too: configuration files use it

from . import enums, ops, optim, options
from ._custom_args import (
    ICustomArgParser,
    flattenTensorStructure,
    reconstructTensorStructure,
    registerCustomArgParser,
)
from ._environment import ipuHardwareIsAvailable, ipuHardwareVersion, isRunningOnIpu
from ._logging import apply_environment as _apply_environment
from ._logging import setLogLevel
from .accessor import AsynchronousDataAccessor
from .blocks import (
    BeginBlock,
    Block,
    BlockFunction,
    LegacyBeginBlockFn,
    removeBlocks,
)
from .dataloader import DataLoader
from .enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    HalfFloatCastingBehavior,
    Liveness,
    MatMulSerializationMode,
    MeanReductionStrategy,
    MultiConvPlanType,
    OutputMode,
    OverlapMode,
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from .errors import (
    Error,
    RecoverableError,
    UnrecoverableError,
    createPoptorchError,
)
from .executor import PoplarExecutor
from .models import inferenceModel, trainingModel
from .ops import identity_loss
from .options import (
    BlockId,
    ConfigFileError,
    Options,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    TensorLocationSettings,
)

__version__ = "3.4.0+emulator"

_apply_environment()

__all__ = [
    "AsynchronousDataAccessor",
    "AutoStage",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "BlockId",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "ICustomArgParser",
    "LegacyBeginBlockFn",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConvPlanType",
    "Options",
    "OutputMode",
    "OverlapMode",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PoplarExecutor",
    "RecoverableError",
    "ReductionType",
    "SerialPhasedExecution",
    "ShardedExecution",
    "SharingStrategy",
    "Stage",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "__version__",
    "createPoptorchError",
    "enums",
    "flattenTensorStructure",
    "identity_loss",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "isRunningOnIpu",
    "ops",
    "optim",
    "options",
    "reconstructTensorStructure",
    "registerCustomArgParser",
    "removeBlocks",
    "setLogLevel",
    "trainingModel",
]
