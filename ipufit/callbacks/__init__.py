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
    from .history import History
    from .loggers import CSVLogger, MLflowLogger, TensorBoard, WandbLogger
    from .measuring import GradientMonitor, Throughput
    from .monitoring import (
        EarlyStopping,
        LearningRateScheduler,
        ReduceLROnPlateau,
        StopAfter,
        TerminateOnNaN,
    )
    from .progress import ProgressBar, ProgressDisplay, make_progress
    from .swap_ema_weights import SwapEMAWeights

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
    "ProgressBar",
    "ProgressDisplay",
    "ReduceLROnPlateau",
    "StopAfter",
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
    "history": ("History",),
    "loggers": ("CSVLogger", "MLflowLogger", "TensorBoard", "WandbLogger"),
    "measuring": ("GradientMonitor", "Throughput"),
    "monitoring": (
        "EarlyStopping",
        "LearningRateScheduler",
        "ReduceLROnPlateau",
        "StopAfter",
        "TerminateOnNaN",
    ),
    "progress": ("ProgressBar", "ProgressDisplay", "make_progress"),
    "swap_ema_weights": ("SwapEMAWeights",),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = imported_at_first_use(__name__, _HOMES)
