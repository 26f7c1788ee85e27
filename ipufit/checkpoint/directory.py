# SPDX-License-Identifier: Apache-2.0
"""Replaces and deletes the directory of a checkpoint, and names the files in it.

A directory can't be renamed over another. So an old checkpoint is renamed to a hidden
name beside it (`.NAME.XXXXXXXX.old`) before the new one takes its name. A reader that
finds nothing under the name looks there.

No function deletes a whole tree: files that a checkpoint may have are deleted one by
one, and a directory that holds anything else is left alone.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from ipufit.errors import CheckpointError

from .atomic import beside_of, leftovers, sync_directory

MANIFEST = "manifest.json"
STATE = "state.json"
SUFFIX = ".safetensors"
GROUP = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_NUM_LOOKS = 3
"""How often to look, because a writer may move a checkpoint between two looks."""


def belongs(name: str) -> bool:
    """Whether a checkpoint may have a file of this name.

    Example:
        >>> belongs("model.safetensors"), belongs("../model.safetensors")
        (True, False)
    """
    return name in (MANIFEST, STATE) or group_of(name) is not None


def group_of(name: str) -> str | None:
    """The group of tensors in a file of this name; None if it holds no tensors."""
    stem, suffix = name[: -len(SUFFIX)], name[-len(SUFFIX) :]
    return stem if suffix == SUFFIX and GROUP.fullmatch(stem) else None


def strangers(directory: Path) -> list[str]:
    """The names in a directory that are no files of a checkpoint."""
    with os.scandir(directory) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not belongs(entry.name) or not entry.is_file(follow_symlinks=False)
        )


def standing(target: Path) -> Path | None:
    """The current path of the checkpoint that should be at `target`.

    Returns:
        The target; or the old checkpoint's hidden path, if a writer was killed between
        its two renames; or None if there is no checkpoint.
    """
    for _ in range(_NUM_LOOKS):
        if os.path.lexists(target):
            return target
        old = leftovers(target, "old")
        whole = [path for path in old if (path / MANIFEST).exists()]
        if whole:
            return max(whole, key=_age)
    return None


def is_standing(target: Path, descriptor: int) -> bool:
    """Whether an open directory is the one that `standing` gives now."""
    found = standing(target)
    try:
        return found is not None and os.path.samestat(
            os.stat(found), os.fstat(descriptor)
        )
    except FileNotFoundError:
        return False


def settle(target: Path) -> None:
    """Clean up after killed writers of a checkpoint.

    Raises:
        CheckpointError: The target exists and is no checkpoint.
        OSError: A file can't be renamed or deleted.
    """
    old = standing(target)
    if old is not None and old != target:
        os.rename(old, target)
        sync_directory(target.parent)
    if os.path.lexists(target):
        _check_replaceable(target)
    for leftover in [*leftovers(target, "partial"), *leftovers(target, "old")]:
        delete(leftover)


def put(beside: Path, target: Path) -> None:
    """Rename a complete directory to its target, durably, and delete the old target.

    Raises:
        OSError: It can't be renamed. The old target is still there, or is found by
            `standing`.
    """
    if not os.path.lexists(target):
        os.rename(beside, target)
        sync_directory(target.parent)
        return
    old = beside_of(target, "old")
    os.rename(target, old)
    try:
        os.rename(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rename(old, target)
        raise
    sync_directory(target.parent)
    with contextlib.suppress(OSError):  # the next write tries again
        delete(old)


def remove(target: Path) -> None:
    """Delete a checkpoint so that half of it is never taken for a whole one.

    Raises:
        OSError: The checkpoint can't be deleted.
    """
    trash = beside_of(target, "trash")
    os.rename(target, trash)
    delete(trash)


def delete(directory: Path) -> None:
    """Delete the files of a checkpoint, the manifest first, and their directory.

    Raises:
        OSError: A file can't be deleted, or the directory holds other files.
    """
    names = sorted(os.listdir(directory), key=lambda name: (name != MANIFEST, name))
    for name in filter(belongs, names):
        os.unlink(directory / name)
    os.rmdir(directory)


def _age(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # deleted since
        return 0


def _check_replaceable(target: Path) -> None:
    if not target.is_dir():
        raise CheckpointError(
            f"{str(target)!r} is a file: a checkpoint needs a directory of its own."
        )
    others = strangers(target)
    if others:
        raise CheckpointError(
            f"{str(target)!r} holds {others[0]!r}, which isn't a checkpoint's, and "
            "would be lost: give another path, or move it away."
        )
