# SPDX-License-Identifier: Apache-2.0
"""Files: errors with path and advice, and files written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
from pathlib import Path
from typing import IO, Any, Callable, Iterable, Iterator, NamedTuple

from ._arguments import refuse
from .errors import FileError, IpufitError

_ADVICE = {
    errno.ENOSPC: "Free some space, or give a path on another disk.",
    errno.EDQUOT: "Free some space, or give a path on another disk.",
    errno.EACCES: "Give a path for which you have the permission.",
    errno.EPERM: "Give a path for which you have the permission.",
    errno.EROFS: "Give a path on a file system that can be written.",
    errno.EEXIST: "A folder on the way is a file: give another path.",
    errno.ENOTDIR: "A folder on the way is a file: give another path.",
    errno.ENAMETOOLONG: "Give a shorter name.",
    errno.EISDIR: "It is a folder: give the path of a file.",
    errno.ENXIO: "Give the path of a regular file.",
}


@contextlib.contextmanager
def file_errors(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert errors of the file system to a FileError with path and advice.

    Args:
        what: Predicate of the message, such as "can't be written".
        path: File or folder that the message names.

    Raises:
        FileError: In place of an OSError, with the same `errno`.

    Example:
        >>> with file_errors("can't be read", "/dev/null/x"):
        ...     open("/dev/null/x")
        Traceback (most recent call last):
        ipufit.errors.FileError: '/dev/null/x' can't be read: Not a directory...
    """
    try:
        yield
    except IpufitError:
        raise
    except OSError as cause:
        advice = _ADVICE.get(cause.errno or 0, "Check the path and the disk.")
        error = FileError(
            f"{os.fspath(path)!r} {what}: {cause.strerror or cause}. {advice}"
        )
        error.errno = cause.errno
        raise error from cause


def as_path(given: Any, name: str = "path") -> Path:
    """Return a user's path; refuse values that can't be the path of a file.

    Args:
        given: Any value.
        name: Name of the argument, for the message.

    Raises:
        ConfigError: `given` is neither a str nor a path object of a str, or is empty,
            or has an illegal character or too long a name.

    Example:
        >>> as_path("run/weights").name
        'weights'
        >>> as_path(b"run", "backup_dir")
        Traceback (most recent call last):
        ipufit.errors.ConfigError: backup_dir=b'run': use a path, a str or pathlib.Path.
    """
    is_path = isinstance(given, (str, os.PathLike))
    text = os.fspath(given) if is_path else b""
    if not isinstance(text, str) or not text:
        refuse(name, given, "a path, a str or pathlib.Path")
    try:
        os.lstat(text)
    except ValueError:
        refuse(name, given, "a path that UTF-8 can encode, without the character NUL")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            refuse(name, given, "a shorter path")
    return Path(text)


# Open directories --------------------------------------------------------------------
#
# Whoever may write to a directory can put a link in the place of what is in it. So a
# directory is opened once, and everything in it is done by its descriptor.


class Written(NamedTuple):
    """Size and SHA-256 of a file."""

    size: int
    sha256: str


def make_folder(path: Path) -> None:
    """Create a directory and its missing parents, and sync each."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    with open_folder(path.parent) as parent:
        os.fsync(parent)


@contextlib.contextmanager
def open_folder(path: str | Path, inside: int | None = None) -> Iterator[int]:
    """Open a directory, and yield its descriptor.

    Args:
        inside: Open directory in which it has the name `path`, which isn't a link then.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    flags |= 0 if inside is None else os.O_NOFOLLOW
    folder = os.open(path, flags, dir_fd=inside)
    try:
        yield folder
    finally:
        os.close(folder)


def open_regular(
    path: str | os.PathLike[str], mode: str = "rb", inside: int | None = None
) -> IO[bytes]:
    """Open a regular file; refuse pipes and devices, which may block or never end.

    Args:
        mode: As for `open`.
        inside: Open directory in which it has the name `path`, which isn't a link then.

    Raises:
        OSError: The file can't be opened, or is a pipe, a device or a directory.
    """
    # Without O_NONBLOCK opening a pipe would wait for its other end.
    more = os.O_NONBLOCK | (0 if inside is None else os.O_NOFOLLOW)

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | more, 0o666, dir_fd=inside)

    file = open(path, mode, opener=opener)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.ENXIO, "it is no regular file")
    return file


def hidden_name(name: str, kind: str) -> str:
    """Return a new hidden name for a draft of a file; `hidden_names` finds it."""
    return f".{name}.{secrets.token_hex(4)}.{kind}"


def hidden_names(folder: int | Path, name: str, kinds: str) -> list[str]:
    """List the hidden names in a directory.

    Args:
        name: Regular expression of the files' names that the hidden names are for.
        kinds: Regular expression of the hidden names' kinds.
    """
    form = re.compile(rf"\.{name}\.[0-9a-f]{{8}}\.({kinds})")
    return sorted(filter(form.fullmatch, os.listdir(folder)))


def delete_leftovers(
    folder: int, name: str, kinds: str, delete: Callable[[int, str], None]
) -> None:
    """Delete drafts of killed processes that no process is writing.

    The directory is synced first, so that the files that replaced the drafts are on the
    disk.

    Args:
        name: As for `hidden_names`.
        kinds: As for `hidden_names`.
        delete: Deletes a name in an open directory.
    """
    names = hidden_names(folder, name, kinds)
    if names:
        os.fsync(folder)
    for hidden in names:
        with _free_to_delete(folder, hidden) as is_free:
            if is_free:
                delete(folder, hidden)


@contextlib.contextmanager
def _free_to_delete(folder: int, name: str) -> Iterator[bool]:
    """Lock a name if no process has, and yield whether that worked."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    is_free = True
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a link
            descriptor = os.open(name, flags, dir_fd=folder)
            stack.callback(os.close, descriptor)
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            lock = fcntl.LOCK_SH if is_file else fcntl.LOCK_EX
            try:
                fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
            except OSError:  # another process has it, or nobody can know
                is_free = False
        yield is_free


@contextlib.contextmanager
def draft(
    folder: int,
    name: str,
    mode: int | None = None,
    to_delete: Callable[[list[str]], list[str]] = sorted,
) -> Iterator[tuple[str, int]]:
    """Make a hidden file or directory in an open one, to be renamed when it is whole.

    The draft is locked, so that no other process deletes it as a leftover. Leftovers of
    the same name are deleted first. If an error is raised, the draft is deleted.

    Args:
        mode: Permissions of a directory; None for a file.
        to_delete: As for `remove`.

    Yields:
        The hidden name, and a descriptor.
    """

    def delete(folder: int, hidden: str) -> None:
        with contextlib.suppress(OSError):  # somebody else's
            remove(folder, hidden, to_delete)

    delete_leftovers(folder, re.escape(name), "partial", delete)
    descriptor, hidden = None, hidden_name(name, "partial")
    try:
        while descriptor is None:
            hidden = hidden_name(name, "partial")
            if mode is not None:
                os.mkdir(hidden, mode, dir_fd=folder)
            descriptor = _open_and_lock(folder, hidden, is_new=mode is None)
        try:
            yield hidden, descriptor
        finally:
            os.close(descriptor)
    except BaseException:
        delete(folder, hidden)
        raise


def _open_and_lock(folder: int, hidden: str, *, is_new: bool) -> int | None:
    """Open a draft; return None if another process has taken it for a leftover."""
    new, old = os.O_WRONLY | os.O_CREAT | os.O_EXCL, os.O_RDONLY | os.O_DIRECTORY
    flags = (new if is_new else old) | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(hidden, flags, 0o666, dir_fd=folder)
    except FileNotFoundError:
        if is_new:
            raise
        return None
    is_free = True
    # NFS locks for others what is open for reading, and for all what is for writing.
    lock = fcntl.LOCK_EX if is_new else fcntl.LOCK_SH
    try:
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
    except OSError as error:  # or a file system without locks
        is_free = not isinstance(error, BlockingIOError)
    if is_free and os.fstat(descriptor).st_nlink:
        return descriptor
    os.close(descriptor)
    return None


def write_parts(descriptor: int, parts: Iterable[bytes | memoryview]) -> Written:
    """Write to an open file, and sync it."""
    digest, size = hashlib.sha256(), 0
    for part in parts:
        digest.update(part)
        size += len(part)
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    os.fsync(descriptor)
    return Written(size, digest.hexdigest())


def sync_file(name: str, folder: int) -> Written:
    """Sync a file that another library has written in an open directory."""
    with open_regular(name, "rb", folder) as file:
        os.fsync(file.fileno())
        digest = hashlib.sha256()
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
        return Written(file.tell(), digest.hexdigest())


def put(folder: int, hidden: str, name: str) -> None:
    """Rename a draft that is whole to its name, and sync the directory."""
    os.replace(hidden, name, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def replace_file(target: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Replace a file in one step: readers see the old or the new content, never a part.

    Raises:
        OSError: The file can't be written; the old one is whole then.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     replace_file(Path(folder, "a", "b"), [b"new"])
        ...     Path(folder, "a", "b").read_text()
        'new'
    """
    make_folder(target.parent)
    name = target.name
    with open_folder(target.parent) as folder, draft(folder, name) as (hidden, file):
        write_parts(file, parts)
        put(folder, hidden, name)


def remove(
    folder: int, name: str, to_delete: Callable[[list[str]], list[str]] = sorted
) -> None:
    """Delete a file, a link, or a directory with files in it.

    Files that another process deletes meanwhile cause no error.

    Args:
        to_delete: Returns which names in the directory are deleted, in this order.

    Raises:
        OSError: A file can't be deleted, or the directory holds others.
    """
    with contextlib.suppress(FileNotFoundError):
        try:
            os.unlink(name, dir_fd=folder)
        except IsADirectoryError:
            with open_folder(name, folder) as inner:
                for file in to_delete(os.listdir(inner)):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(file, dir_fd=inner)
            os.rmdir(name, dir_fd=folder)
