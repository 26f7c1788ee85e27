# SPDX-License-Identifier: Apache-2.0
"""What callbacks say when they act."""

from __future__ import annotations

import sys
import warnings

from ipufit.errors import CheckpointWarning


def say(message: str) -> None:
    """Write a line to standard output, at once.

    `sys.stdout` is looked up anew: while a bar is on the screen it is rich's, which
    puts the line above it.

    Args:
        message: Without the line's end.

    Example:
        >>> say("Epoch 3: early stopping")
        Epoch 3: early stopping
    """
    sys.stdout.write(f"{message}\n")
    sys.stdout.flush()


def warn_of_unsaved_eviction(error: Exception) -> None:
    """Warn that a run which has to end couldn't be saved where it is.

    Args:
        error: Why.
    """
    warnings.warn(
        f"SIGTERM came, and the run couldn't be saved: {error} It will go on from the "
        "checkpoint before, if there is one.",
        CheckpointWarning,
        stacklevel=2,
    )
