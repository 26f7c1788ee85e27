# SPDX-License-Identifier: Apache-2.0
"""Writes files and directories so that they exist whole or not at all.

A file is written beside its target, synced, and renamed. A process that is killed in
between leaves a hidden file, `.NAME.XXXXXXXX.KIND` with eight hexadecimal digits, which
the next write of the same name removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import Iterable, NamedTuple, Union

Part = Union[bytes, memoryview]

CHUNK_BYTES = 16 * 2**20
"""Bytes that are written at a time, so that the checksum finds them in the cache."""


class Written(NamedTuple):
    """Size in bytes and SHA-256 of a file, as the manifest lists them."""

    size: int
    sha256: str


def write_file(path: Path, parts: Iterable[Part]) -> Written:
    """Write a new file and sync it.

    Args:
        path: The new file, which must not exist.
        parts: Its content in order; memory views are written without a copy.

    Raises:
        OSError: The file exists, or can't be written.
    """
    digest, size = hashlib.sha256(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                count = os.write(descriptor, rest[:CHUNK_BYTES])
                digest.update(rest[:count])
                size += count
                rest = rest[count:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Written(size, digest.hexdigest())


def replace_file(target: Path, parts: Iterable[Part]) -> Written:
    """Write a file that has the old content or the new one, but never half of it.

    Args:
        target: The file; its folder is made if there is none.
        parts: Its content in order.

    Raises:
        OSError: The file can't be written; the old one is whole then.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     replace_file(Path(folder, "a"), [b"new"]).size
        3
    """
    make_directory(target.parent)
    for leftover in leftovers(target, "partial"):
        os.unlink(leftover)
    beside = beside_of(target, "partial")
    try:
        written = write_file(beside, parts)
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    sync_directory(target.parent)
    return written


def sync_directory(path: Path) -> None:
    """Make durable which names were made, renamed or removed in a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and its parents, durably, unless they exist."""
    if path.is_dir():
        return
    make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    sync_directory(path.parent)


def beside_of(target: Path, kind: str) -> Path:
    """A new hidden path beside a target, which `leftovers` finds again."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.{kind}")


def leftovers(target: Path, kind: str) -> list[Path]:
    """The sorted paths that killed processes left beside a target.

    Args:
        target: A file or directory, which needn't exist.
        kind: Ending of the paths, such as "partial".
    """
    form = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.{kind}")
    if not target.parent.is_dir():
        return []
    names = sorted(os.listdir(target.parent))
    return [target.with_name(name) for name in names if form.fullmatch(name)]
