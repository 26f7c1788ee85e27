# SPDX-License-Identifier: Apache-2.0
"""SIGTERM, by which schedulers tell a process to end."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import Any, Iterator

from ipufit.state import RunState


@contextlib.contextmanager
def heard_eviction(run: RunState) -> Iterator[None]:
    """Tell a run of SIGTERM instead of dying, if somebody in it saves then.

    Python hears signals in the main thread alone: in others nothing is done.

    Args:
        run: Its `is_evicted` is set.

    Example:
        >>> import os
        >>> run = RunState()
        >>> run.on_eviction(lambda: None)
        >>> with heard_eviction(run):
        ...     os.kill(os.getpid(), signal.SIGTERM)
        >>> run.is_evicted
        True
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not run.heeds_eviction or not is_main:
        yield
        return

    def hear(_number: int, _frame: Any) -> None:
        run.is_evicted = True

    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield
    finally:
        # None is a handler that wasn't installed from Python.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
