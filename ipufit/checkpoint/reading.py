# SPDX-License-Identifier: Apache-2.0
"""Reads the files of one checkpoint without leaving its directory, and hashes them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, TypeVar

from ipufit.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MissingCheckpointError,
)
from ipufit.types import PathLike

from .atomic import CHUNK_BYTES, Written
from .directory import MANIFEST, is_standing, standing
from .manifest import MAX_BYTES, Manifest, load_manifest

T = TypeVar("T")

MAX_READS = 100
"""How often to read anew, after a writer has replaced the checkpoint meanwhile."""

# Errors of a file that is missing, no regular file, or on a broken disk.
_DAMAGES = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO}
_DAMAGES |= {errno.EIO}


class Member:
    """A file of a checkpoint, which is read once from its start.

    Args:
        descriptor: Descriptor of the open file.
        size: Size of the file in bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._file = os.fdopen(descriptor, "rb", buffering=0, closefd=False)
        self._digest = hashlib.sha256()

    def read(self, count: int) -> bytes:
        """Read the next `count` bytes.

        Raises:
            ValueError: The file has fewer.
        """
        data = bytearray(count)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, view: memoryview) -> None:
        """Fill a view with the next bytes.

        Raises:
            ValueError: The file has fewer.
        """
        while view:
            count = self._file.readinto(view[:CHUNK_BYTES])
            if not count:
                raise ValueError("it ends too early")
            self._digest.update(view[:count])
            view = view[count:]

    def check(self, expected: Written) -> None:
        """Compare the checksum with the manifest's, once everything was read.

        Raises:
            ValueError: The file is longer, or its checksum differs.
        """
        if self._file.read(1):
            raise ValueError("it goes on after its end")
        if self._digest.hexdigest() != expected.sha256:
            raise ValueError("its SHA-256 isn't the one in the manifest")


def read_standing(path: PathLike, read: Callable[[Path, int], T]) -> T:
    """Read the checkpoint at a path, while another process may be writing there.

    A writer deletes the checkpoint that it has replaced. So an error counts only if the
    checkpoint that was read is still at the path; otherwise the new one is read.

    Args:
        path: The checkpoint's directory.
        read: Reads a checkpoint. It gets the directory's path and descriptor.

    Raises:
        MissingCheckpointError: There is no checkpoint at the path.
        CheckpointError: `read` has raised it; or a writer is always faster.
    """
    target = Path(os.path.realpath(path))
    for _ in range(MAX_READS):
        found = standing(target)
        if found is None:
            raise MissingCheckpointError(
                f"There is no checkpoint at {str(target)!r}. Check the path."
            )
        with _opened_directory(found) as folder:
            if folder is None:
                continue
            try:
                return read(found, folder)
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

    Yields:
        Its descriptor; None if the directory has gone.

    Raises:
        CheckpointError: The directory can't be opened.
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

    Raises:
        ValueError: It is no regular file.
        OSError: The file can't be opened.
    """
    # Without O_NONBLOCK opening a pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=directory)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        yield Member(descriptor, status.st_size)
    finally:
        os.close(descriptor)


class OpenedCheckpoint(NamedTuple):
    """A checkpoint whose manifest was read and whose files are open.

    Attributes:
        path: The checkpoint's directory.
        manifest: Sizes and checksums of the files.
        members: The open files by name.
    """

    path: Path
    manifest: Manifest
    members: dict[str, Member]

    def load(self, name: str, load: Callable[[Member], T]) -> T:
        """Load a file, and return its content only if it is what was written.

        Args:
            name: Name of the file.
            load: Reads the file to its end.

        Raises:
            CheckpointError: The file is damaged or can't be read.
        """
        with blaming(self.path, name):
            loaded = load(self.members[name])
            self.members[name].check(self.manifest.files[name])
            return loaded


@contextlib.contextmanager
def opened_checkpoint(path: Path, folder: int) -> Iterator[OpenedCheckpoint]:
    """Read the manifest and open the files it lists, which must have the right sizes.

    All are opened before any is read: a writer that replaces the checkpoint meanwhile
    takes only their names away.

    Args:
        path: The checkpoint's directory.
        folder: Descriptor of the directory.

    Raises:
        CheckpointError: A file is damaged or can't be read.
    """
    with blaming(path, MANIFEST), opened_member(folder, MANIFEST) as file:
        if file.size > MAX_BYTES:
            raise ValueError(f"it has {file.size} bytes, too many")
        manifest = load_manifest(file.read(file.size))
    members = {}
    with contextlib.ExitStack() as stack:
        for name, expected in manifest.files.items():
            with blaming(path, name):
                member = stack.enter_context(opened_member(folder, name))
                if member.size != expected.size:
                    raise ValueError(
                        f"it has {member.size} bytes, and had {expected.size}"
                    )
                members[name] = member
        yield OpenedCheckpoint(path, manifest, members)


@contextlib.contextmanager
def blaming(path: Path, name: str) -> Iterator[None]:
    """Raise errors with the names of the checkpoint and the file they are about.

    Args:
        path: The checkpoint's directory.
        name: Name of the file.

    Raises:
        DamagedCheckpointError: Instead of any ValueError, and of an OSError whose cause
            is the file itself.
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
