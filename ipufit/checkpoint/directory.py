# SPDX-License-Identifier: Apache-2.0
"""The directory of one checkpoint: what belongs into it, and how it comes and goes.

A directory can't be renamed over another. So an old checkpoint is renamed to a hidden
name beside it (`.NAME.XXXXXXXX.old`) before the new one takes its name, and whoever
finds nothing under the name looks there.

Nothing here deletes a tree: only files that a checkpoint may have, one by one. A
directory that holds anything else is left alone.
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
_LOOKS = 3  # a writer may have moved what was looked for to where one has looked


def belongs(name: str) -> bool:
    """Whether a file of that name may be a checkpoint's.

    Example:
        >>> belongs("model.safetensors"), belongs("../model.safetensors")
        (True, False)
    """
    return name in (MANIFEST, STATE) or group_of(name) is not None


def group_of(name: str) -> str | None:
    """The group of tensors that a file of that name holds, if any."""
    stem, suffix = name[: -len(SUFFIX)], name[-len(SUFFIX) :]
    return stem if suffix == SUFFIX and GROUP.fullmatch(stem) else None


def strangers(directory: Path) -> list[str]:
    """What is in a directory and isn't a checkpoint's, by name."""
    with os.scandir(directory) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not belongs(entry.name) or not entry.is_file(follow_symlinks=False)
        )


def standing(target: Path) -> Path | None:
    """Where the checkpoint of that name is now.

    Args:
        target: Where it should be.

    Returns:
        The target; or what a writer killed between its two renames left of the old
        checkpoint; or None.
    """
    for _ in range(_LOOKS):
        if os.path.lexists(target):
            return target
        old = leftovers(target, "old")
        whole = [path for path in old if (path / MANIFEST).exists()]
        if whole:
            return max(whole, key=_age)
    return None


def is_standing(target: Path, descriptor: int) -> bool:
    """Whether an open directory is the one that `standing` gives now."""
    place = standing(target)
    try:
        return place is not None and os.path.samestat(
            os.stat(place), os.fstat(descriptor)
        )
    except FileNotFoundError:
        return False


def settle(target: Path) -> None:
    """Clean up after writers of this name that were killed.

    Raises:
        CheckpointError: Something else has the name.
        OSError: It can't be cleaned up.
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
    """Give a complete directory its name, durably, and delete what had it before.

    Raises:
        OSError: It can't; what had the name has it still, or is found by `standing`.
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
    """Delete a checkpoint so that half of it is never taken for one.

    Raises:
        OSError: It can't be deleted.
    """
    trash = beside_of(target, "trash")
    os.rename(target, trash)
    delete(trash)


def delete(directory: Path) -> None:
    """Delete the files of a checkpoint, the manifest first, and their directory.

    Raises:
        OSError: It can't be deleted, or it holds something else.
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
