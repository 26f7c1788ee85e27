# SPDX-License-Identifier: Apache-2.0
"""Something happens at the n-th step that changes the file system."""

from __future__ import annotations

import contextlib
import errno
import os
from unittest import mock

STEPS = ("mkdir", "open", "write", "fsync", "rename", "replace", "unlink", "rmdir")


class Killed(BaseException):
    """Raised in the place of every step after a kill, so that nothing is cleaned up."""


@contextlib.contextmanager
def killed_at_step(number):
    """Let nothing happen from step `number` on; yields the names of the steps taken."""

    def kill():
        raise Killed

    with contextlib.suppress(Killed), at_step(number, kill, is_last=True) as taken:
        yield taken


@contextlib.contextmanager
def at_step(number, happens, *, is_last=False):
    """Call `happens` instead of step `number`; yields the names of the steps taken.

    Args:
        is_last: Whether it is called instead of all later steps, too.
    """
    taken = []

    def wrapped(name, original):
        def step(*arguments, **keywords):
            if name == "open" and not arguments[1] & os.O_CREAT:
                return original(*arguments, **keywords)  # it only reads
            at = len(taken)
            taken.append(name)
            if at == number or (is_last and at > number):
                if name == "write" and at == number:  # half of it gets through
                    descriptor, data = arguments
                    original(descriptor, data[: len(data) // 2])
                happens()
            return original(*arguments, **keywords)

        return step

    with contextlib.ExitStack() as stack:
        for name in STEPS:
            patched = wrapped(name, getattr(os, name))
            stack.enter_context(mock.patch.object(os, name, patched))
        yield taken


def full_disk():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
