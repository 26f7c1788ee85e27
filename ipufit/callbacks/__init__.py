# SPDX-License-Identifier: Apache-2.0
"""Callbacks: Keras's hooks and callbacks, History, progress, loggers.

A callback is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipufit._lazy import imported_at_first_use

if TYPE_CHECKING:
    from .backup_and_restore import BackupAndRestore
    from .base import Callback
    from .callback_list import CallbackList
    from .csv_logger import CSVLogger
    from .early_stopping import EarlyStopping
    from .gradient_monitor import GradientMonitor
    from .history import History
    from .lambda_callback import LambdaCallback
    from .learning_rate_scheduler import LearningRateScheduler
    from .mlflow_logger import MLflowLogger
    from .model_checkpoint import ModelCheckpoint
    from .profiler import Profiler
    from .progress import ProgressDisplay, make_progress
    from .progress_bar import ProgressBar
    from .reduce_lr_on_plateau import ReduceLROnPlateau
    from .swap_ema_weights import SwapEMAWeights
    from .tensorboard import TensorBoard
    from .terminate_on_nan import TerminateOnNaN
    from .throughput import Throughput
    from .wandb_logger import WandbLogger

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
    "backup_and_restore": ("BackupAndRestore",),
    "base": ("Callback",),
    "callback_list": ("CallbackList",),
    "csv_logger": ("CSVLogger",),
    "early_stopping": ("EarlyStopping",),
    "gradient_monitor": ("GradientMonitor",),
    "history": ("History",),
    "lambda_callback": ("LambdaCallback",),
    "learning_rate_scheduler": ("LearningRateScheduler",),
    "mlflow_logger": ("MLflowLogger",),
    "model_checkpoint": ("ModelCheckpoint",),
    "profiler": ("Profiler",),
    "progress": ("ProgressDisplay", "make_progress"),
    "progress_bar": ("ProgressBar",),
    "reduce_lr_on_plateau": ("ReduceLROnPlateau",),
    "swap_ema_weights": ("SwapEMAWeights",),
    "tensorboard": ("TensorBoard",),
    "terminate_on_nan": ("TerminateOnNaN",),
    "throughput": ("Throughput",),
    "wandb_logger": ("WandbLogger",),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = imported_at_first_use(__name__, _HOMES)
