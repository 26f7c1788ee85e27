# SPDX-License-Identifier: Apache-2.0
"""Callbacks: Keras's hooks and callbacks, History, progress, loggers.

A callback is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipufit._lazy import imported_at_first_use

if TYPE_CHECKING:
    from .base import Callback, CallbackList, LambdaCallback
    from .checkpoints import BackupAndRestore, ModelCheckpoint
    from .gradient_monitor import GradientMonitor
    from .history import History
    from .learning_rate import LearningRateScheduler, ReduceLROnPlateau
    from .loggers import CSVLogger, MLflowLogger, TensorBoard, WandbLogger
    from .profiler import Profiler
    from .progress import ProgressBar, ProgressDisplay, make_progress
    from .stopping import EarlyStopping, TerminateOnNaN
    from .swap_ema_weights import SwapEMAWeights
    from .throughput import Throughput

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "GradientMonitor",
    "History",
    "LambdaCallback",
    "LearningRateScheduler",
    "MLflowLogger",
    "ModelCheckpoint",
    "Profiler",
    "ProgressBar",
    "ProgressDisplay",
    "ReduceLROnPlateau",
    "SwapEMAWeights",
    "TensorBoard",
    "TerminateOnNaN",
    "Throughput",
    "WandbLogger",
    "make_progress",
]

_HOMES = {
    "base": ("Callback", "CallbackList", "LambdaCallback"),
    "checkpoints": ("BackupAndRestore", "ModelCheckpoint"),
    "gradient_monitor": ("GradientMonitor",),
    "history": ("History",),
    "learning_rate": ("LearningRateScheduler", "ReduceLROnPlateau"),
    "loggers": ("CSVLogger", "MLflowLogger", "TensorBoard", "WandbLogger"),
    "profiler": ("Profiler",),
    "progress": ("ProgressBar", "ProgressDisplay", "make_progress"),
    "stopping": ("EarlyStopping", "TerminateOnNaN"),
    "swap_ema_weights": ("SwapEMAWeights",),
    "throughput": ("Throughput",),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = imported_at_first_use(__name__, _HOMES)
