# SPDX-License-Identifier: Apache-2.0
"""The lock of a directory that one run writes to."""

from __future__ import annotations

import contextlib
import os
import platform
import stat
import time
from pathlib import Path

from ipufit._signals import uninterrupted
from ipufit.errors import ConfigError

LOCK = ".lock"
"""Name of the locked file, which says which run has the directory."""
_MOST_GONE = 100
"""How often others may delete the directory before a lock gives up."""


class DirectoryLock:
    """Keeps other runs out of a directory until it is released.

    The operating system releases the lock when the process ends, even if it is killed.

    Args:
        directory: Path of the directory, which is made.

    Raises:
        ConfigError: Another run has the directory. The message has its process, host
            and time.
        OSError: The file system has no locks, or the directory can't be written.
    """

    _descriptor: int | None = None

    @uninterrupted
    def __init__(self, directory: Path) -> None:
        import fcntl  # Windows doesn't have it

        self._path = directory / LOCK
        self._is_new = False
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        is_held, num_gone = False, 0
        while not is_held:
            with contextlib.suppress(FileExistsError):
                directory.mkdir(parents=True)
                self._is_new = True
            try:
                descriptor = os.open(self._path, flags, 0o644)
            except FileNotFoundError:
                num_gone += 1
                if num_gone == _MOST_GONE:  # no file can be made there
                    raise
                continue  # the previous holder has just deleted the directory
            try:
                about = os.fstat(descriptor)
                if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
                    raise OSError(f"{self._path} isn't a file of its own")
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The previous holder may have deleted the file since it was opened.
                is_held = self._is_there(descriptor)
            except BlockingIOError as error:
                text = os.read(descriptor, 200).decode(errors="replace")
                holder = "".join(filter(str.isprintable, text)) or "it has just begun"
                raise ConfigError(
                    f"Another run has {str(directory)!r}: {holder}. Each would delete "
                    "the other's checkpoints. Wait for its end, or use another "
                    "directory for this run."
                ) from error
            finally:
                if not is_held:
                    os.close(descriptor)
        self._descriptor, self._process = descriptor, os.getpid()
        _descriptors.add(descriptor)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on {platform.node()}, since {since}"
        os.ftruncate(descriptor, 0)
        os.write(descriptor, holder.encode())

    def _is_there(self, descriptor: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), self._path.lstat())
        return False

    @uninterrupted
    def release(self) -> None:
        """Release the directory; delete it if the lock has made it and it is empty."""
        descriptor = self._descriptor
        if descriptor is None or os.getpid() != self._process:
            return
        with contextlib.suppress(OSError):
            if self._is_there(descriptor):
                self._path.unlink()
            if self._is_new:
                self._path.parent.rmdir()
        self._descriptor = None
        _descriptors.discard(descriptor)
        os.close(descriptor)

    def __del__(self) -> None:
        self.release()  # Ctrl-C may have prevented an explicit release


_descriptors: set[int] = set()


def _close_all() -> None:
    while _descriptors:
        os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    # A lock lasts until all copies of its descriptor are closed, and loading processes
    # may outlive a killed run for seconds.
    os.register_at_fork(after_in_child=_close_all)
