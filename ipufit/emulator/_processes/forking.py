# SPDX-License-Identifier: Apache-2.0
"""Let workers of loaders be forked in a process that exchanges tensors with others.

A thread of gloo frees its part of a tensor a moment after an exchange is done. For that
it registers with the interpreter, under a lock. A process that is forked just then
inherits the lock as taken, and before Python 3.12 it waits for it for ever
(https://github.com/python/cpython/issues/112275).
"""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist

_IS_MENDED = sys.version_info >= (3, 12)
_SECONDS_TO_FREE = 0.005


def guard_forks() -> None:
    """Have every later fork of this process wait for gloo's threads, if there are any.

    It is called once: what is registered stays.
    """
    if not _IS_MENDED and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_let_threads_finish)


def _let_threads_finish() -> None:
    if dist.is_available() and dist.is_initialized():
        time.sleep(_SECONDS_TO_FREE)
        sys._current_frames()  # takes the lock, and so waits until it is free
