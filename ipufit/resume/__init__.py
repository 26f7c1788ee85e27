# SPDX-License-Identifier: Apache-2.0
"""Going on with a run that was interrupted: what is saved, checked and put back."""

from __future__ import annotations

from .settings import check_same_run, compiled_settings, described, numeric_settings
from .snapshot import (
    Snapshot,
    TrainedState,
    calls_done,
    check_has_run,
    find_checkpoint,
    groups_of_module,
    position_of,
)

__all__ = [
    "Snapshot",
    "TrainedState",
    "calls_done",
    "check_has_run",
    "check_same_run",
    "compiled_settings",
    "described",
    "find_checkpoint",
    "groups_of_module",
    "numeric_settings",
    "position_of",
]
