# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F403, F405 - `__all__` says which of the names are exported
"""Keras-like `compile`, `fit`, `evaluate` and `predict` for PyTorch on IPUs.

Names are imported when they are first used, so that `ipufit.emulator`, which stands
alone, neither chooses a PopTorch nor waits for the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._poptorch import poptorch
    from ._version import __version__
    from .batching import BatchPlan
    from .callbacks import *
    from .checkpoint import *
    from .config import IPUConfig
    from .data import CachedDataset, FixedSizeBatches
    from .engine.metric_state import log
    from .errors import *
    from .metrics import Metric, StreamedMetric
    from .mixing import Mixing
    from .model import *
    from .optimizers import *

__all__ = [
    "BackupAndRestore",
    "BakedInWarning",
    "BatchPlan",
    "BenchmarkResult",
    "CSVLogger",
    "CachedDataset",
    "Callback",
    "CheckReport",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "CheckpointWarning",
    "ConfigError",
    "ConstantBuffersWarning",
    "CopiedModuleWarning",
    "CoverageWarning",
    "DamagedCheckpointError",
    "DataError",
    "DataRanOutWarning",
    "DroppedRowsWarning",
    "EarlyStopping",
    "EmptyUpdatesWarning",
    "FileError",
    "Finding",
    "FixedSizeBatches",
    "Frozen",
    "GradientMonitor",
    "History",
    "IPUConfig",
    "IPUModel",
    "IpufitError",
    "IpufitWarning",
    "LambdaCallback",
    "LearningRateScheduler",
    "LossScaleRamp",
    "MLflowLogger",
    "Metric",
    "MissingCheckpointError",
    "Mixing",
    "ModelCheckpoint",
    "NonFiniteGradientWarning",
    "NonFiniteLossWarning",
    "NotCompiledError",
    "Optimizer",
    "OtherLayoutWarning",
    "OtherNumbersWarning",
    "PerEpoch",
    "ProcessError",
    "ProgressBar",
    "ReduceLROnPlateau",
    "Schedule",
    "SharedRateWarning",
    "StopAfter",
    "StreamedMetric",
    "SwapEMAWeights",
    "TensorBoard",
    "TerminateOnNaN",
    "Throughput",
    "UnknownNameError",
    "UnsupportedError",
    "WandbLogger",
    "WholeStreamWarning",
    "__version__",
    "average_checkpoints",
    "compare",
    "freeze",
    "load_checkpoint",
    "log",
    "poptorch",
]

_HOMES = {
    "_poptorch": ["poptorch"],
    "_version": ["__version__"],
    "batching": ["BatchPlan"],
    "checkpoint": [
        "Checkpoint",
        "CheckpointStore",
        "average_checkpoints",
        "load_checkpoint",
    ],
    "config": ["IPUConfig"],
    "data": ["CachedDataset", "FixedSizeBatches"],
    "errors": [name for name in __all__ if name.endswith(("Error", "Warning"))],
    "metrics": ["Metric", "StreamedMetric"],
    "mixing": ["Mixing"],
    "model": ["BenchmarkResult", "CheckReport", "Finding", "IPUModel", "compare"],
    "optimizers": [
        "Frozen",
        "LossScaleRamp",
        "Optimizer",
        "PerEpoch",
        "Schedule",
        "freeze",
    ],
    "engine.metric_state": ["log"],
}
_PACKAGES = ("distributed", "metrics")
"""Packages of which users take names by `ipufit.metrics.AUC` and the like."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # who would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use."""
        if name in _PACKAGES:
            return importlib.import_module(f".{name}", __name__)
        if name not in __all__:
            errors = importlib.import_module("ipufit.errors")
            what = "module 'ipufit'"
            raise errors.unknown_attribute(what, "ipufit", name, __all__)
        home = importlib.import_module(f".{_HOME_OF.get(name, 'callbacks')}", __name__)
        value = globals()[name] = getattr(home, name)
        return value


def __dir__() -> list[str]:
    """List the public names."""
    return list(__all__)
