# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a `fit` goes on from."""

from __future__ import annotations

from pathlib import Path

from ipufit import checkpoint as files
from ipufit.callbacks import CallbackList
from ipufit.callbacks.base import CallbackLike
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
            in the directory; or the checkpoint is of a model alone.
        CheckpointError: The checkpoint can't be read, or is damaged.
    """
    if resume is not None and resume != AUTO:
        path = Path(resume)
        if (path / files.MANIFEST).exists() or not path.is_dir():
            return _with_run(files.read_checkpoint(path))
        found = files.load_newest([files.CheckpointStore(path)], stacklevel=4)
        if found is None:
            if any(files.belongs(file.name) for file in path.iterdir()):
                return _with_run(files.read_checkpoint(path))  # which names the fault
            raise ConfigError(f"There is no checkpoint in {str(path)!r} to resume.")
        return _with_run(found[1])
    stores = [
        store
        for callback in CallbackList(callbacks).callbacks
        if (resume == AUTO or getattr(callback, "resumes", False))
        and (store := getattr(callback, "store", None)) is not None
        and isinstance(store, files.CheckpointStore)
    ]
    if resume == AUTO and not stores:
        raise ConfigError(
            "resume='auto' goes on from the checkpoints of a callback, and there is "
            "none that keeps any. Add BackupAndRestore(directory), or give a path."
        )
    found = files.load_newest(stores, stacklevel=4) if stores else None
    return None if found is None else _with_run(found[1])


def _with_run(checkpoint: files.Checkpoint) -> files.Checkpoint:
    check_has_run(checkpoint)
    return checkpoint
