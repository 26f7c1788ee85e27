# SPDX-License-Identifier: Apache-2.0
"""Messages and warnings of callbacks."""

from __future__ import annotations

import sys
import warnings

from ipufit.errors import CheckpointWarning


def say(message: str) -> None:
    """Write a line to standard output, and flush it.

    While a progress bar is on the screen, `sys.stdout` is rich's, which prints the line
    above the bar. So it is looked up each time.

    Example:
        >>> say("Epoch 3: early stopping")
        Epoch 3: early stopping
    """
    sys.stdout.write(f"{message}\n")
    sys.stdout.flush()


def warn_of_unsaved_eviction(error: Exception) -> None:
    """Warn that a run couldn't be saved when SIGTERM ended it, with the reason."""
    warnings.warn(
        f"SIGTERM came, and the run couldn't be saved: {error} It will go on from the "
        "checkpoint before, if there is one.",
        CheckpointWarning,
        stacklevel=2,
    )
