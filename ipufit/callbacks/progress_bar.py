# SPDX-License-Identifier: Apache-2.0
"""`ProgressBar`: the bars of `verbose=1`, as a callback."""

from __future__ import annotations

from .progress import BarProgress


class ProgressBar(BarProgress):
    """Show what `verbose=1` shows, wherever it is wanted: lines if no bar can be.

    It takes the place of the display that `verbose` asks for, and shows what the
    callbacks before it left in the logs.

    Args:
        console: Where to; standard output by default.
        clock: Seconds, for rates.

    Example:
        >>> import sys
        >>> from rich.console import Console
        >>> bar = ProgressBar(Console(file=sys.stderr))
    """
