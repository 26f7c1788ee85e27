# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a `fit` goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ipufit import checkpoint as files
from ipufit.callbacks import CallbackList
from ipufit.callbacks.base import CallbackLike
from ipufit.distributed import processes
from ipufit.errors import ConfigError
from ipufit.types import PathLike

from .snapshot import check_has_run

AUTO = "auto"


def find_checkpoint(
    resume: PathLike | None, callbacks: CallbackLike
) -> files.Checkpoint | None:
    """The checkpoint of the run that a `fit` goes on with; called by `fit`.

    Args:
        resume: A checkpoint or a directory of them; `"auto"` for the whole one of the
            callbacks that is furthest in the run; None for that of a callback which
            resumes by itself.
        callbacks: Callbacks of the `fit`.

    Returns:
        None if there is no checkpoint to go on from.

    Raises:
        ConfigError: `"auto"`, and no callback keeps checkpoints; or there are none
            in the directory; or the checkpoint is of a model alone; or processes find
            other ones.
        CheckpointError: The checkpoint can't be read, or is damaged.
    """
    found = None
    with files.missing_allowed():
        found = _found(resume, callbacks)
    if resume is not None or _stores(resume, callbacks):
        _check_common(found)
    return found


def _check_common(checkpoint: files.Checkpoint | None) -> None:
    """Refuse to begin if processes don't go on from the same checkpoint."""
    everyone = processes()
    run = None if checkpoint is None else checkpoint.state["run"]
    runs = everyone.gathered(run)
    odd = [index for index, one in enumerate(runs) if one != runs[0]]
    if odd:
        where = ["none" if one is None else f"update {one['updates']}" for one in runs]
        raise ConfigError(
            f"Process 0 goes on from {where[0]}, and process {odd[0]} from "
            f"{where[odd[0]]}: all must read the same checkpoint. Keep checkpoints in "
            "a directory that all hosts share."
        )


def _stores(resume: PathLike | None, callbacks: CallbackLike) -> list[Any]:
    """The checkpoints that callbacks keep, as far as they count."""
    return [
        store
        for callback in CallbackList(callbacks).callbacks
        if (resume == AUTO or getattr(callback, "resumes", False))
        and (store := getattr(callback, "store", None)) is not None
        and isinstance(store, files.CheckpointStore)
    ]


def _found(resume: PathLike | None, callbacks: CallbackLike) -> files.Checkpoint | None:
    if resume is not None and resume != AUTO:
        path = Path(resume)
        if (path / files.MANIFEST).exists() or not path.is_dir():
            return _with_run(files.load_checkpoint(path))
        found = files.load_newest([files.CheckpointStore(path)], stacklevel=5)
        if found is None:
            if any(files.belongs(file.name) for file in path.iterdir()):
                return _with_run(files.load_checkpoint(path))  # which names the fault
            raise ConfigError(f"There is no checkpoint in {str(path)!r} to resume.")
        return _with_run(found[1])
    stores = _stores(resume, callbacks)
    if resume == AUTO and not stores:
        raise ConfigError(
            "resume='auto' goes on from the checkpoints of a callback, and there is "
            "none that keeps any. Add BackupAndRestore(directory), or give a path."
        )
    found = files.load_newest(stores, stacklevel=5) if stores else None
    return None if found is None else _with_run(found[1])


def _with_run(checkpoint: files.Checkpoint) -> files.Checkpoint:
    check_has_run(checkpoint)
    return checkpoint
