# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while the device works: PopTorch is in C++, and Python hears of it later."""

from __future__ import annotations

import contextlib
import threading

# The functions of `signal` take 20 times as long: they make enums of all they return.
from _signal import getsignal  # type: ignore[import-not-found,unused-ignore]
from _signal import signal as set_handler
from signal import SIGINT, default_int_handler, raise_signal
from typing import Any, Iterator


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Let Ctrl-C wait for the end of this context, so that the device's work is whole.

    A second one doesn't wait. A handler other than Python's own is left alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or getsignal(SIGINT) is not default_int_handler:
        yield
        return
    is_interrupted = False

    def wait(number: int, frame: Any) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            raise KeyboardInterrupt
        is_interrupted = True

    set_handler(SIGINT, wait)
    try:
        yield
    finally:
        set_handler(SIGINT, default_int_handler)
        if is_interrupted:
            raise_signal(SIGINT)
