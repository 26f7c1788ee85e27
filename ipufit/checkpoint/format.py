# SPDX-License-Identifier: Apache-2.0
"""One checkpoint: a directory of safetensors and JSON.

`docs/checkpoint-format.md` is its specification.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, TypeVar

from torch import Tensor

from ipufit.errors import CheckpointError, UnsupportedError
from ipufit.types import PathLike

from . import directory, manifest
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
from .manifest import Manifest, Record
from .reading import Member, blaming, opened_member, read_standing
from .tensors import check_tensors, read_tensors, tensor_parts

T = TypeVar("T")

MAX_STATE_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a checkpoint holds.

    Args:
        tensors: Groups of tensors by name: "model" becomes `model.safetensors`.
        state: Nested dicts with str keys, lists, str, int, float, bool and None.
        path: Where it was read from; None if it wasn't.
    """

    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None


def write_checkpoint(
    path: PathLike, checkpoint: Checkpoint, *, record: Record | None = None
) -> None:
    """Write a checkpoint, or leave what is there whole.

    Whenever the process is killed, the path has the old checkpoint or the new one (or
    none, if there was none). Only one process may write to a path at a time.

    Args:
        path: A directory; its parents are made. A checkpoint there is replaced.
        checkpoint: What to write. Tensors are read while this runs, and not kept.
        record: What a `CheckpointStore` orders it by.

    Raises:
        UnsupportedError: Something in it can't be written; nothing was.
        CheckpointError: The file system refuses, `errno` says why (the disk is full,
            for one); or the path holds something else.

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
            _fill(beside, contents, record)
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
    """Read a checkpoint, if every byte of it is what was written.

    Args:
        path: Its directory.

    Returns:
        The tensors, on the host, and the state. Shapes and dtypes are the file's: they
        may be others than your model's.

    Raises:
        MissingCheckpointError: There is none.
        DamagedCheckpointError: A file is missing, cut, changed or malformed.
        CheckpointError: A newer ipufit wrote it, or it can't be read.
    """
    return read_standing(path, _checkpoint)


load_checkpoint = read_checkpoint  # as users know it


def verify_checkpoint(path: PathLike) -> Manifest:
    """Compare every file of a checkpoint with the manifest, without loading any.

    Args:
        path: Its directory.

    Returns:
        What the manifest says.

    Raises:
        MissingCheckpointError: There is none.
        DamagedCheckpointError: A file is missing, cut or changed.
        CheckpointError: A newer ipufit wrote it, or it can't be read.
    """
    return read_standing(path, _verified)


def read_manifest(path: PathLike) -> Manifest:
    """Read the manifest, and compare the sizes of the files with it.

    This is fast, and finds what is missing or cut, not what was changed.

    Args:
        path: The checkpoint's directory.

    Returns:
        What the manifest says.

    Raises:
        MissingCheckpointError: There is none.
        DamagedCheckpointError: The manifest is damaged, or a file missing or cut.
        CheckpointError: A newer ipufit wrote it, or it can't be read.
    """
    return read_standing(path, _listed)


def _contents(checkpoint: Checkpoint) -> dict[str, Iterable[Part]]:
    """The files to write, but for the manifest, or an error before any is."""
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
    beside: Path, contents: Mapping[str, Iterable[Part]], record: Record | None
) -> None:
    os.mkdir(beside)
    files = {name: write_file(beside / name, parts) for name, parts in contents.items()}
    write_file(beside / MANIFEST, [manifest.dump_manifest(files, record)])
    sync_directory(beside)


def _unwritten(target: Path, cause: OSError) -> CheckpointError:
    hint = {
        errno.ENOSPC: " Free some, or keep fewer checkpoints.",
        errno.EDQUOT: " Free some, or keep fewer checkpoints.",
    }.get(cause.errno or 0, "")
    error = CheckpointError(
        f"Checkpoint {str(target)!r} couldn't be written: {cause.strerror or cause}."
        f"{hint} What was there before is whole."
    )
    error.errno = cause.errno
    return error


def _checkpoint(place: Path, folder: int) -> Checkpoint:
    tensors: dict[str, dict[str, Tensor]] = {}
    with _opened(place, folder) as (listed, members):
        state = _read(place, members, listed, STATE, _load_state)
        for name in listed.files:
            group = directory.group_of(name)
            if group is not None:
                tensors[group] = _read(place, members, listed, name, _load_tensors)
    return Checkpoint(tensors, state, place)


def _verified(place: Path, folder: int) -> Manifest:
    with _opened(place, folder) as (listed, members):
        for name in listed.files:
            _read(place, members, listed, name, _skim)
    return listed


def _listed(place: Path, folder: int) -> Manifest:
    with _opened(place, folder) as (listed, _):
        return listed


@contextlib.contextmanager
def _opened(place: Path, folder: int) -> Iterator[tuple[Manifest, dict[str, Member]]]:
    """The manifest, and the files it lists, with the sizes it gives.

    All are opened before any is read: a writer that replaces the checkpoint meanwhile
    takes only their names away.
    """
    listed = _manifest(place, folder)
    with contextlib.ExitStack() as stack:
        members = {}
        for name, expected in listed.files.items():
            with blaming(place, name):
                members[name] = stack.enter_context(opened_member(folder, name))
                _check_size(members[name], expected.size)
        yield listed, members


def _manifest(place: Path, folder: int) -> Manifest:
    with blaming(place, MANIFEST), opened_member(folder, MANIFEST) as member:
        if member.size > manifest.MAX_BYTES:
            raise ValueError(f"it has {member.size} bytes, too many")
        return manifest.load_manifest(member.read(member.size))


def _read(
    place: Path,
    members: Mapping[str, Member],
    listed: Manifest,
    name: str,
    load: Callable[[Member], T],
) -> T:
    """Load a file, and give it back only if it is what was written."""
    with blaming(place, name):
        loaded = load(members[name])
        members[name].check(listed.files[name])
        return loaded


def _check_size(member: Member, size: int) -> None:
    if member.size != size:
        raise ValueError(f"it has {member.size} bytes, and had {size}")


def _load_state(member: Member) -> dict[str, Any]:
    if member.size > MAX_STATE_BYTES:
        raise ValueError(f"it has {member.size} bytes, too many")
    state = load_json(member.read(member.size))
    if not isinstance(state, dict):
        raise ValueError("it holds no object")
    return state


def _load_tensors(member: Member) -> dict[str, Tensor]:
    return read_tensors(member, member.size)


def _skim(member: Member) -> None:
    buffer = memoryview(bytearray(min(member.size, CHUNK_BYTES)))
    rest = member.size
    while rest:
        member.read_into(buffer[:rest])
        rest -= min(rest, len(buffer))
