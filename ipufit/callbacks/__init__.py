# SPDX-License-Identifier: Apache-2.0
"""What may happen beside a run: hooks, History, progress, Keras's callbacks."""

from __future__ import annotations

from .base import Callback, CallbackList
from .early_stopping import EarlyStopping
from .history import History
from .learning_rate_scheduler import LearningRateScheduler
from .model_checkpoint import ModelCheckpoint
from .progress import ProgressDisplay, make_progress
from .reduce_lr_on_plateau import ReduceLROnPlateau

__all__ = [
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "History",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "ProgressDisplay",
    "ReduceLROnPlateau",
    "make_progress",
]
