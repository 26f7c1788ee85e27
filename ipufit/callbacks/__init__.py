# SPDX-License-Identifier: Apache-2.0
"""What may happen beside a run: hooks, History, progress."""

from __future__ import annotations

from .base import Callback, CallbackList
from .history import History
from .progress import ProgressDisplay, make_progress

__all__ = ["Callback", "CallbackList", "History", "ProgressDisplay", "make_progress"]
