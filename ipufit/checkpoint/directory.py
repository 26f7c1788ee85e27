# SPDX-License-Identifier: Apache-2.0
"""One checkpoint is a directory, which exists whole or not at all.

It is written beside its target, synced, and renamed. A process that is killed in
between leaves a hidden path, `.NAME.XXXXXXXX.KIND` with eight hexadecimal digits, which
the next write of the same name removes.

A directory can't be renamed over another. So an old checkpoint is renamed to a hidden
path beside it (`.NAME.XXXXXXXX.old`) before the new one takes its name. A reader that
finds nothing under the name looks there.

No function deletes a whole tree: files that a checkpoint may have are deleted one by
one, and a directory that holds anything else is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterable

from torch import Tensor

from ipufit.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MissingCheckpointError,
    UnsupportedError,
)
from ipufit.types import PathLike

from .format import (
    GROUP,
    MANIFEST,
    STATE,
    SUFFIX,
    Checkpoint,
    Manifest,
    SavedAt,
    Written,
    belongs,
    dump_json,
    dump_manifest,
    dump_tensors,
    load_json,
    load_manifest,
    load_tensors,
)

MAX_READS = 100  # how often to read anew, if a writer replaced what was read
MAX_STATE_BYTES = 64 * 2**20
_MAX_MANIFEST_BYTES = 2**20
_BLOCK_BYTES = 2**20
_NUM_LOOKS = 3  # how often to look, as a writer may rename between two looks

# Errors of a file that is missing, no regular file, or on a broken disk.
_DAMAGES = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO}
_DAMAGES |= {errno.EIO}


# Files and paths ---------------------------------------------------------------------


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> Written:
    """Write a new file and sync it.

    Raises:
        OSError: The file exists, or can't be written.
    """
    digest, size = hashlib.sha256(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        for part in parts:
            digest.update(part)
            size += len(part)
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Written(size, digest.hexdigest())


def replace_file(target: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file that has the old content or the new one, but never half of it.

    Raises:
        OSError: The file can't be written; the old one is whole then.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     replace_file(Path(folder, "a", "b"), [b"new"])
        ...     Path(folder, "a", "b").read_text()
        'new'
    """
    _make_directory(target.parent)
    for leftover in _leftovers(target, "partial"):
        os.unlink(leftover)
    beside = _beside(target, "partial")
    try:
        write_file(beside, parts)
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    _sync(target.parent)


def _sync(directory: Path) -> None:
    """Sync a directory, so that new, renamed and removed names survive a crash."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_directory(path: Path) -> None:
    """Create a directory and its missing parents, and sync each."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    _sync(path.parent)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.{kind}")


def _leftovers(target: Path, kind: str) -> list[Path]:
    """List the paths of a kind that killed processes left beside a target."""
    form = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.{kind}")
    if not target.parent.is_dir():
        return []
    names = sorted(os.listdir(target.parent))
    return [target.with_name(name) for name in names if form.fullmatch(name)]


def foreign_files(directory: Path) -> list[str]:
    """List the names in a directory that are no files of a checkpoint."""
    with os.scandir(directory) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not belongs(entry.name) or not entry.is_file(follow_symlinks=False)
        )


def _current_path(target: Path) -> Path | None:
    """Find the checkpoint that should be at a path.

    Returns:
        The path; or the hidden one of the old checkpoint, if a writer was killed
        between its two renames; or None if there is no checkpoint.
    """
    for _ in range(_NUM_LOOKS):
        if os.path.lexists(target):
            return target
        aged = []
        for path in _leftovers(target, "old"):
            with contextlib.suppress(FileNotFoundError):  # deleted since
                if (path / MANIFEST).exists():
                    aged.append((path.stat().st_mtime_ns, path))
        if aged:
            return max(aged)[1]
    return None


def remove(target: Path) -> None:
    """Delete a checkpoint so that half of it is never taken for a whole one.

    Raises:
        OSError: The checkpoint can't be deleted.
    """
    trash = _beside(target, "trash")
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


# Writing -----------------------------------------------------------------------------


def write_checkpoint(
    path: PathLike, checkpoint: Checkpoint, *, moment: SavedAt | None = None
) -> None:
    """Write a checkpoint, or leave the old one whole.

    If the process is killed at any moment, the path has the old checkpoint or the new
    one (or none, if there was none). Only one process may write to a path at a time.

    Args:
        path: A directory; its parents are made. A checkpoint there is replaced.
        checkpoint: The checkpoint. Its tensors are read while this runs, and not kept.
        moment: When in a run it is saved and the figure it has then.

    Raises:
        UnsupportedError: A value or tensor can't be written; no file was.
        CheckpointError: The file system refuses, and `errno` says why (the disk may be
            full); or the path holds something else.

    Example:
        >>> import tempfile, torch
        >>> weights = {"w": torch.ones(2)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_checkpoint(f"{folder}/a", Checkpoint({"model": weights}, {}))
        ...     load_checkpoint(f"{folder}/a").tensors["model"]["w"]
        tensor([1., 1.])
    """
    target = Path(os.path.realpath(path))
    state = dump_json(checkpoint.state, name="state")
    if not isinstance(checkpoint.state, dict) or len(state) > MAX_STATE_BYTES:
        raise UnsupportedError(
            f"The state is a {type(checkpoint.state).__name__} of {len(state)} bytes; "
            f"it must be a dict of {MAX_STATE_BYTES} at most. Large values belong "
            "into tensors."
        )
    for group in checkpoint.tensors:
        if not isinstance(group, str) or not GROUP.fullmatch(group):
            raise UnsupportedError(
                f"{group!r} is no name for a group of tensors: take up to 64 "
                "lower-case letters, digits, `_` and `-`, a letter first."
            )
    try:
        _make_directory(target.parent)
        _clean_up(target)
        beside = _beside(target, "partial")
        try:
            os.mkdir(beside)
            files = {STATE: write_file(beside / STATE, [state])}
            for group, tensors in checkpoint.tensors.items():
                name = group + SUFFIX
                files[name] = write_file(beside / name, dump_tensors(tensors, group))
            write_file(beside / MANIFEST, [dump_manifest(files, moment)])
            _sync(beside)
            _put(beside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                delete(beside)
            raise
    except CheckpointError:
        raise
    except OSError as cause:
        is_full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = " Free some, or keep fewer checkpoints." if is_full else ""
        error = CheckpointError(
            f"Checkpoint {str(target)!r} couldn't be written: "
            f"{cause.strerror or cause}.{hint} What was there before is whole."
        )
        error.errno = cause.errno
        raise error from cause


def _clean_up(target: Path) -> None:
    """Clean up after killed writers, and refuse to replace anything but a checkpoint.

    Raises:
        CheckpointError: The target exists and is no checkpoint.
        OSError: A file can't be renamed or deleted.
    """
    old = _current_path(target)
    if old is not None and old != target:
        os.rename(old, target)
        _sync(target.parent)
    if os.path.lexists(target):
        if not target.is_dir():
            raise CheckpointError(
                f"{str(target)!r} is a file: a checkpoint needs a directory of its own."
            )
        foreign = foreign_files(target)
        if foreign:
            raise CheckpointError(
                f"{str(target)!r} holds {foreign[0]!r}, which isn't a checkpoint's, "
                "and would be lost: give another path, or move it away."
            )
    for leftover in [*_leftovers(target, "partial"), *_leftovers(target, "old")]:
        delete(leftover)


def _put(beside: Path, target: Path) -> None:
    """Rename a complete directory to its target, durably, and delete the old target.

    Raises:
        OSError: It can't be renamed. The old target is still there, or is found by
            `_current_path`.
    """
    old = _beside(target, "old") if os.path.lexists(target) else None
    if old is not None:
        os.rename(target, old)
    try:
        os.rename(beside, target)
    except BaseException:
        if old is not None:
            with contextlib.suppress(OSError):
                os.rename(old, target)
        raise
    _sync(target.parent)
    if old is not None:
        with contextlib.suppress(OSError):  # the next write tries again
            delete(old)


# Reading -----------------------------------------------------------------------------


def load_checkpoint(path: PathLike) -> Checkpoint:
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
    found, _, contents = _read(path, belongs)
    state = contents.pop(STATE)
    tensors = {name[: -len(SUFFIX)]: group for name, group in contents.items()}
    return Checkpoint(tensors, state, found)


def read_group(path: PathLike, group: str) -> dict[str, Tensor]:
    """Read one group of tensors of a checkpoint, as `load_checkpoint` reads all.

    Returns:
        The tensors by name; none if the checkpoint has no such group.
    """
    name = group + SUFFIX
    _, _, contents = _read(path, lambda other: other == name)
    tensors: dict[str, Tensor] = contents.get(name, {})
    return tensors


def read_manifest(path: PathLike) -> Manifest:
    """Read the manifest, and compare the sizes of the files with it.

    This is fast. It finds files that are missing or cut, not those that were changed.

    Raises:
        MissingCheckpointError: There is no checkpoint.
        DamagedCheckpointError: The manifest is damaged, or a file missing or cut.
        CheckpointError: A newer ipufit wrote it, or a file can't be read.
    """
    return _read(path, lambda name: False)[1]


def _read(
    path: PathLike, is_wanted: Callable[[str], bool]
) -> tuple[Path, Manifest, dict[str, Any]]:
    """Read files of the checkpoint at a path, while another process may write there.

    A writer deletes the checkpoint that it has replaced. So an error counts only if the
    checkpoint that was read is still at the path; otherwise the new one is read.

    Args:
        is_wanted: Whether to read the file of a name.

    Returns:
        The checkpoint's directory, its manifest, and the files' contents by name.
    """
    target = Path(os.path.realpath(path))
    for _ in range(MAX_READS):
        found = _current_path(target)
        if found is None:
            raise MissingCheckpointError(
                f"There is no checkpoint at {str(target)!r}. Check the path."
            )
        try:
            folder = os.open(found, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _blamed(found, "its directory", error) from error
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, folder)
            name = MANIFEST
            try:
                file = stack.enter_context(_opened(folder, name))
                manifest = load_manifest(file.read(_MAX_MANIFEST_BYTES + 1))
                files = {}
                for name, written in manifest.files.items():
                    files[name] = stack.enter_context(_opened(folder, name))
                    size = os.fstat(files[name].fileno()).st_size
                    if size != written.size:
                        raise ValueError(f"it has {size} bytes, and had {written.size}")
                contents = {}  # read when all are open: a writer takes only names away
                for name in filter(is_wanted, files):
                    contents[name] = _content(name, files[name], manifest.files[name])
                return found, manifest, contents
            except (OSError, ValueError) as error:
                current = _current_path(target)
                with contextlib.suppress(FileNotFoundError):
                    if current and os.path.samestat(os.stat(current), os.fstat(folder)):
                        raise _blamed(found, name, error) from error
    raise CheckpointError(
        f"Checkpoint {str(target)!r} was replaced {MAX_READS} times while it was read: "
        "another process writes it faster than this one reads. Save less often, or "
        "each time to another path, as CheckpointStore does."
    )


def _opened(folder: int, name: str) -> BinaryIO:
    """Open a regular file right in a directory; links aren't followed."""
    # Without O_NONBLOCK opening a pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no regular file")
    return os.fdopen(descriptor, "rb")


def _content(name: str, file: BinaryIO, written: Written) -> Any:
    if name == STATE and written.size > MAX_STATE_BYTES:
        raise ValueError(f"it has {written.size} bytes, too many")
    digest = hashlib.sha256()
    for block in iter(lambda: file.read(_BLOCK_BYTES), b""):
        digest.update(block)
    if digest.hexdigest() != written.sha256:
        raise ValueError("its SHA-256 isn't the one in the manifest")
    if name != STATE:
        return load_tensors(file.fileno())
    file.seek(0)
    state = load_json(file.read())
    if not isinstance(state, dict):
        raise ValueError("it holds no object")
    return state


def _blamed(path: Path, name: str, cause: Exception) -> CheckpointError:
    """Build the error for a file of a checkpoint that can't be read."""
    if isinstance(cause, CheckpointError):
        return type(cause)(f"Checkpoint {str(path)!r}: {cause}")
    number = getattr(cause, "errno", None)
    reason = cause.strerror if isinstance(cause, OSError) else cause
    if number == errno.ELOOP:
        reason = "it is a symbolic link"
    if isinstance(cause, ValueError) or number in _DAMAGES:
        error: CheckpointError = DamagedCheckpointError(
            f"Checkpoint {str(path)!r} is damaged: {name}: {reason}. Use another one."
        )
    else:
        error = CheckpointError(
            f"Checkpoint {str(path)!r} can't be read: {name}: {reason}."
        )
    error.errno = number
    return error
