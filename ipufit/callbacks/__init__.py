# SPDX-License-Identifier: Apache-2.0
"""What may happen beside a run: hooks, History, progress, Keras's callbacks."""

from __future__ import annotations

from .backup_and_restore import BackupAndRestore
from .base import Callback, CallbackList
from .csv_logger import CSVLogger
from .early_stopping import EarlyStopping
from .gradient_monitor import GradientMonitor
from .history import History
from .lambda_callback import LambdaCallback
from .learning_rate_scheduler import LearningRateScheduler
from .mlflow_logger import MLflowLogger
from .model_checkpoint import ModelCheckpoint
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
