# SPDX-License-Identifier: Apache-2.0
"""Files: errors with path and advice, files written whole, and checksums."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
from pathlib import Path
from typing import Any, Callable, Iterator

from .errors import ConfigError, FileError, IpufitError

_ADVICE = {
    errno.ENOSPC: "Free some space, or give a path on another disk.",
    errno.EDQUOT: "Free some space, or give a path on another disk.",
    errno.EACCES: "Give a path for which you have the permission.",
    errno.EPERM: "Give a path for which you have the permission.",
    errno.EROFS: "Give a path on a file system that can be written.",
    errno.EEXIST: "A folder on the way is a file: give another path.",
    errno.ENOTDIR: "A folder on the way is a file: give another path.",
    errno.EISDIR: "It is a folder: give the path of a file.",
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
    """Return a user's path; refuse what is none, bytes and the empty str.

    Args:
        given: Any value.
        name: Name of the argument, for the message.

    Raises:
        ConfigError: It is neither a str nor a path object of a str.

    Example:
        >>> as_path("run/weights").name
        'weights'
        >>> as_path(b"run", "backup_dir")
        Traceback (most recent call last):
        ipufit.errors.ConfigError: backup_dir=b'run' is no path: give a str or a ...
    """
    is_path = isinstance(given, (str, os.PathLike))
    if not is_path or not isinstance(os.fspath(given), str) or given == "":
        is_small = isinstance(given, (str, bytes, int, float, type(None)))
        shown = repr(given) if is_small else f"{type(given).__name__}(...)"
        raise ConfigError(f"{name}={shown} is no path: give a str or a pathlib.Path.")
    return Path(given)


def written_beside(target: Path, write: Callable[[Path], Any]) -> Path:
    """Write a file under a new random name in its own folder, and sync it."""
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        write(partial)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
    except BaseException:
        if partial.exists():
            partial.unlink()
        raise
    return partial


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
