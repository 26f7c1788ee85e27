# SPDX-License-Identifier: Apache-2.0
"""Files of one directory, opened without leaving it and hashed as they are read."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import Callable, Iterator, TypeVar

from ipufit.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MissingCheckpointError,
)
from ipufit.types import PathLike

from .atomic import CHUNK_BYTES, Written
from .directory import is_standing, standing

T = TypeVar("T")

MAX_READS = 100
"""Each further one means that a writer has put another checkpoint there meanwhile."""

# What the system says of a file that is missing, another thing, or on a broken disk.
_DAMAGES = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO}
_DAMAGES |= {errno.EIO}


class Member:
    """A file that is read once, from its start.

    Args:
        descriptor: An open file.
        size: How many bytes it has.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._file = os.fdopen(descriptor, "rb", buffering=0, closefd=False)
        self._digest = hashlib.sha256()

    def read(self, count: int) -> bytes:
        """The next bytes, all of them.

        Raises:
            ValueError: There are fewer.
        """
        data = bytearray(count)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, view: memoryview) -> None:
        """Fill a view with the next bytes.

        Raises:
            ValueError: There are fewer.
        """
        while view:
            count = self._file.readinto(view[:CHUNK_BYTES])
            if not count:
                raise ValueError("it ends too early")
            self._digest.update(view[:count])
            view = view[count:]

    def check(self, expected: Written) -> None:
        """Compare with what the manifest says, once everything was read.

        Raises:
            ValueError: It is another.
        """
        if self._file.read(1):
            raise ValueError("it goes on after its end")
        if self._digest.hexdigest() != expected.sha256:
            raise ValueError("its SHA-256 isn't the one in the manifest")


def read_standing(path: PathLike, read: Callable[[Path, int], T]) -> T:
    """Read the checkpoint that has a name now, while others may be written to it.

    A writer deletes what it has replaced. So an error counts only if the checkpoint
    that was read is still the one of that name; otherwise the new one is read.

    Args:
        path: The directory of the checkpoint.
        read: Reads from a directory, which it gets with its descriptor.

    Returns:
        What `read` returned.

    Raises:
        MissingCheckpointError: Nothing has the name.
        CheckpointError: What `read` has raised; or a writer is always faster.
    """
    target = Path(os.path.realpath(path))
    for _ in range(MAX_READS):
        place = standing(target)
        if place is None:
            raise MissingCheckpointError(
                f"There is no checkpoint at {str(target)!r}. Check the path."
            )
        with _opened_directory(place) as folder:
            if folder is None:
                continue
            try:
                return read(place, folder)
            except CheckpointError:
                if is_standing(target, folder):
                    raise
    raise CheckpointError(
        f"Checkpoint {str(target)!r} was replaced {MAX_READS} times while it was read: "
        "another process writes it faster than this one reads. Save less often, or "
        "each time to another path, as CheckpointStore does."
    )


@contextlib.contextmanager
def _opened_directory(path: Path) -> Iterator[int | None]:
    """Open a directory, so that its files are found even if it is renamed.

    Args:
        path: The directory.

    Yields:
        Its descriptor; None if nothing has the name any more.

    Raises:
        CheckpointError: It can't be opened.
    """
    descriptor = None
    with blaming(path, "its directory"), contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextlib.contextmanager
def opened_member(directory: int, name: str) -> Iterator[Member]:
    """Open a regular file right in a directory; links aren't followed.

    Args:
        directory: Descriptor of the directory.
        name: Name of the file.

    Yields:
        The file.

    Raises:
        ValueError: It is no regular file.
        OSError: It can't be opened.
    """
    # not blocking, as a pipe would wait for a writer
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=directory)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        yield Member(descriptor, status.st_size)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def blaming(path: Path, name: str) -> Iterator[None]:
    """Say of which file of which checkpoint an error is.

    Args:
        path: The checkpoint.
        name: The file.

    Raises:
        DamagedCheckpointError: Instead of any ValueError, and of an OSError that the
            file itself is the reason of.
        CheckpointError: Instead of any other OSError.
    """
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"Checkpoint {str(path)!r}: {error}") from error
    except ValueError as error:
        raise DamagedCheckpointError(
            f"Checkpoint {str(path)!r} is damaged: {name}: {error}. Use another one."
        ) from error
    except OSError as error:
        raise _unreadable(path, name, error) from error


def _unreadable(path: Path, name: str, cause: OSError) -> CheckpointError:
    if cause.errno in _DAMAGES:
        reason = "it is a symbolic link" if cause.errno == errno.ELOOP else None
        error: CheckpointError = DamagedCheckpointError(
            f"Checkpoint {str(path)!r} is damaged: {name}: "
            f"{reason or cause.strerror}. Use another one."
        )
    else:
        error = CheckpointError(
            f"Checkpoint {str(path)!r} can't be read: {name}: {cause.strerror}."
        )
    error.errno = cause.errno
    return error
