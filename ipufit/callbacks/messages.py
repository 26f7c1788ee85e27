# SPDX-License-Identifier: Apache-2.0
"""Messages and warnings of callbacks."""

from __future__ import annotations

import sys
import warnings

from ipufit.errors import CheckpointWarning


def say(message: str) -> None:
    """Write a line to standard output, and flush it.

    `sys.stdout` is looked up each time: while a bar is on the screen it is rich's,
    which puts the line above the bar.

    Example:
        >>> say("Epoch 3: early stopping")
        Epoch 3: early stopping
    """
    sys.stdout.write(f"{message}\n")
    sys.stdout.flush()


def warn_of_unsaved_eviction(error: Exception) -> None:
    """Warn that a run couldn't be saved when SIGTERM ended it, and say why."""
    warnings.warn(
        f"SIGTERM came, and the run couldn't be saved: {error} It will go on from the "
        "checkpoint before, if there is one.",
        CheckpointWarning,
        stacklevel=2,
    )
