# SPDX-License-Identifier: Apache-2.0
"""One checkpoint: a directory of safetensors and JSON.

`docs/reference/checkpoint-format.md` is its specification.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Iterable, Mapping

from torch import Tensor

from ipufit.errors import CheckpointError, UnsupportedError
from ipufit.types import PathLike

from . import directory
from .atomic import (
    CHUNK_BYTES,
    Part,
    beside_of,
    make_directory,
    sync_directory,
    write_file,
)
from .directory import GROUP, MANIFEST, STATE, SUFFIX
from .json_values import dump_json, load_json
from .manifest import Manifest, Record, dump_manifest
from .moment import Moment
from .reading import Member, opened_checkpoint, read_standing
from .tensors import check_tensors, read_tensors, tensor_parts

MAX_STATE_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The tensors and the state that a checkpoint holds.

    Args:
        tensors: Groups of tensors by name: "model" becomes `model.safetensors`.
        state: Nested dicts with str keys, lists, str, int, float, bool and None.
        path: Directory that it was read from; None if it wasn't read.
    """

    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None


def write_checkpoint(
    path: PathLike,
    checkpoint: Checkpoint,
    *,
    record: Record | None = None,
    moment: Moment | None = None,
) -> None:
    """Write a checkpoint, or leave the old one whole.

    If the process is killed at any moment, the path has the old checkpoint or the new
    one (or none, if there was none). Only one process may write to a path at a time.

    Args:
        path: A directory; its parents are made. A checkpoint there is replaced.
        checkpoint: The checkpoint. Its tensors are read while this runs, and not kept.
        record: Sequence number, epoch and figure, by which a `CheckpointStore` orders
            checkpoints.
        moment: When in a run it is saved and the figure it has then, for
            `average_checkpoints`.

    Raises:
        UnsupportedError: A value or tensor can't be written; no file was.
        CheckpointError: The file system refuses, and `errno` says why (the disk may be
            full); or the path holds something else.

    Example:
        >>> import tempfile, torch
        >>> weights = {"w": torch.ones(2)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_checkpoint(f"{folder}/a", Checkpoint({"model": weights}, {}))
        ...     read_checkpoint(f"{folder}/a").tensors["model"]["w"]
        tensor([1., 1.])
    """
    target = Path(os.path.realpath(path))
    contents = _contents(checkpoint)
    try:
        make_directory(target.parent)
        directory.settle(target)
        beside = beside_of(target, "partial")
        try:
            _fill(beside, contents, record, moment)
            directory.put(beside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                directory.delete(beside)
            raise
    except CheckpointError:
        raise
    except OSError as error:
        raise _unwritten(target, error) from error


def read_checkpoint(path: PathLike) -> Checkpoint:
    """Read a checkpoint, if every byte is as it was written.

    Args:
        path: The checkpoint's directory.

    Returns:
        The tensors, on the host, and the state. Their shapes and dtypes are those of
        the file, which may differ from your model's.

    Raises:
        MissingCheckpointError: There is no checkpoint.
        DamagedCheckpointError: A file is missing, cut, changed or malformed.
        CheckpointError: A newer ipufit wrote it, or a file can't be read.
    """
    return read_standing(path, _checkpoint)


load_checkpoint = read_checkpoint  # the public name


def read_group(path: PathLike, group: str) -> dict[str, Tensor]:
    """Read one group of tensors of a checkpoint, and no other.

    Args:
        path: The checkpoint's directory.
        group: Name of the group, such as "model".

    Returns:
        The tensors by name, on the host; those that are tied are one tensor. Nothing
        if the checkpoint has no such group.

    Raises:
        MissingCheckpointError: There is no checkpoint.
        DamagedCheckpointError: The manifest, or the file of the group, is missing, cut,
            changed or malformed.
        CheckpointError: A newer ipufit wrote it, or a file can't be read.
    """
    return read_standing(path, partial(_group, group + SUFFIX))


def verify_checkpoint(path: PathLike) -> Manifest:
    """Compare every file of a checkpoint with the manifest, without loading any.

    Args:
        path: The checkpoint's directory.

    Raises:
        MissingCheckpointError: There is no checkpoint.
        DamagedCheckpointError: A file is missing, cut or changed.
        CheckpointError: A newer ipufit wrote it, or a file can't be read.
    """
    return read_standing(path, _verified)


def read_manifest(path: PathLike) -> Manifest:
    """Read the manifest, and compare the sizes of the files with it.

    This is fast. It finds files that are missing or cut, not those that were changed.

    Args:
        path: The checkpoint's directory.

    Raises:
        MissingCheckpointError: There is no checkpoint.
        DamagedCheckpointError: The manifest is damaged, or a file missing or cut.
        CheckpointError: A newer ipufit wrote it, or a file can't be read.
    """
    return read_standing(path, _listed)


def _contents(checkpoint: Checkpoint) -> dict[str, Iterable[Part]]:
    """The contents of all files but the manifest, checked before any is written."""
    state = dump_json(checkpoint.state, name="state")
    if not isinstance(checkpoint.state, dict) or len(state) > MAX_STATE_BYTES:
        raise UnsupportedError(
            f"The state is a {type(checkpoint.state).__name__} of {len(state)} bytes; "
            f"it must be a dict of {MAX_STATE_BYTES} at most. Large values belong "
            "into tensors."
        )
    contents: dict[str, Iterable[Part]] = {STATE: [state]}
    for group, tensors in checkpoint.tensors.items():
        if not isinstance(group, str) or not GROUP.fullmatch(group):
            raise UnsupportedError(
                f"{group!r} is no name for a group of tensors: take up to 64 "
                "lower-case letters, digits, `_` and `-`, a letter first."
            )
        check_tensors(tensors, group)
        contents[group + SUFFIX] = tensor_parts(tensors)
    return contents


def _fill(
    beside: Path,
    contents: Mapping[str, Iterable[Part]],
    record: Record | None,
    moment: Moment | None,
) -> None:
    os.mkdir(beside)
    files = {name: write_file(beside / name, parts) for name, parts in contents.items()}
    write_file(beside / MANIFEST, [dump_manifest(files, record, moment)])
    sync_directory(beside)


def _unwritten(target: Path, cause: OSError) -> CheckpointError:
    is_full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = " Free some, or keep fewer checkpoints." if is_full else ""
    error = CheckpointError(
        f"Checkpoint {str(target)!r} couldn't be written: {cause.strerror or cause}."
        f"{hint} What was there before is whole."
    )
    error.errno = cause.errno
    return error


def _checkpoint(path: Path, folder: int) -> Checkpoint:
    tensors: dict[str, dict[str, Tensor]] = {}
    with opened_checkpoint(path, folder) as opened:
        state = opened.load(STATE, _load_state)
        for name in opened.manifest.files:
            group = directory.group_of(name)
            if group is not None:
                tensors[group] = opened.load(
                    name, lambda file: read_tensors(file, file.size)
                )
    return Checkpoint(tensors, state, path)


def _group(name: str, path: Path, folder: int) -> dict[str, Tensor]:
    with opened_checkpoint(path, folder) as opened:
        if name not in opened.manifest.files:
            return {}
        return opened.load(name, lambda file: read_tensors(file, file.size))


def _verified(path: Path, folder: int) -> Manifest:
    with opened_checkpoint(path, folder) as opened:
        for name in opened.manifest.files:
            opened.load(name, _skim)
        return opened.manifest


def _listed(path: Path, folder: int) -> Manifest:
    with opened_checkpoint(path, folder) as opened:
        return opened.manifest


def _load_state(member: Member) -> dict[str, Any]:
    if member.size > MAX_STATE_BYTES:
        raise ValueError(f"it has {member.size} bytes, too many")
    state = load_json(member.read(member.size))
    if not isinstance(state, dict):
        raise ValueError("it holds no object")
    return state


def _skim(member: Member) -> None:
    """Read a file for its checksum alone."""
    buffer = memoryview(bytearray(min(member.size, CHUNK_BYTES)))
    rest = member.size
    while rest:
        member.read_into(buffer[:rest])
        rest -= min(rest, len(buffer))
