# SPDX-License-Identifier: Apache-2.0
"""Files of executables: written whole or not at all, and read only if they end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from typing import IO, BinaryIO, Iterator


@contextlib.contextmanager
def new_file(path: str) -> Iterator[IO[bytes]]:
    """Write a file that is whole, and on the disk, when it gets its name.

    Missing folders are made. What killed processes left of the same name is deleted.

    Raises:
        OSError: The file can't be written.
    """
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    leftover = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}\.partial")
    for other in filter(leftover.fullmatch, os.listdir(folder)):
        old = os.path.join(folder, other)
        with contextlib.suppress(OSError), open_regular(old) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # or a process writes it
            os.unlink(old)
    # A name that nobody can guess, and a file that is new: a link is never followed.
    partial = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb") as new:
            is_free = True
            try:
                fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # or a file system without locks
                is_free = not isinstance(error, BlockingIOError)
            if is_free and os.fstat(new.fileno()).st_nlink:
                yield new
                new.flush()
                os.fsync(new.fileno())
                os.replace(partial, path)
            else:  # another process took it for a leftover before it was locked
                with new_file(path) as again:
                    yield again
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: str) -> BinaryIO:
    """Open a file to read it, and nothing that blocks or never ends.

    Raises:
        OSError: It can't be opened, or is a pipe or a device.
    """
    # Without O_NONBLOCK opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "It is no regular file", path)
    return os.fdopen(descriptor, "rb")
