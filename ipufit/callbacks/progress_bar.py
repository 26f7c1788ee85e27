# SPDX-License-Identifier: Apache-2.0
"""`ProgressBar`: the bars of `verbose=1`, as a callback."""

from __future__ import annotations

from .progress import BarProgress


class ProgressBar(BarProgress):
    """Show the bars of `verbose=1`, or lines where no bar can be redrawn.

    It replaces the display that `verbose` chooses, and shows figures that earlier
    callbacks add to the logs.

    Args:
        console: Console to write to; standard output by default.
        clock: Returns the time in seconds, from any origin.

    Example:
        >>> import sys
        >>> from rich.console import Console
        >>> bar = ProgressBar(Console(file=sys.stderr))
    """
