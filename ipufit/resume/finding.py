# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a `fit` goes on from."""

from __future__ import annotations

from pathlib import Path

from ipufit import checkpoint as files
from ipufit.callbacks import CallbackList
from ipufit.callbacks.base import CallbackLike
from ipufit.errors import ConfigError
from ipufit.types import PathLike

AUTO = "auto"


def find_checkpoint(
    resume: PathLike | None, callbacks: CallbackLike
) -> files.Checkpoint | None:
    """The checkpoint that is meant.

    Args:
        resume: A checkpoint or a directory of them; `"auto"` for the whole one of the
            callbacks that is furthest in the run; None for that of a callback which
            resumes by itself.
        callbacks: Those of `fit`.

    Returns:
        It; None if there is none to go on from.

    Raises:
        ConfigError: `"auto"`, and no callback keeps checkpoints; or there are none
            in the directory.
        CheckpointError: It can't be read, or is damaged.
    """
    given = CallbackList(callbacks).callbacks
    stores = [
        store
        for callback in given
        if (resume == AUTO or getattr(callback, "resumes", False))
        and (store := getattr(callback, "store", None)) is not None
        and isinstance(store, files.CheckpointStore)
    ]
    if resume is not None and resume != AUTO:
        path = Path(resume)
        if (path / files.MANIFEST).exists() or not path.is_dir():
            return files.read_checkpoint(path)
        store = files.CheckpointStore(path)
        found = files.load_newest([store], stacklevel=4)  # of fit()
        if found is None:
            if any(files.belongs(file.name) for file in path.iterdir()):
                return files.read_checkpoint(path)  # which tells of the manifest
            raise ConfigError(f"There is no checkpoint in {str(path)!r} to resume.")
        return found[1]
    if resume == AUTO and not stores:
        raise ConfigError(
            "resume='auto' goes on from the checkpoints of a callback, and there is "
            "none that keeps any. Add BackupAndRestore(directory), or give a path."
        )
    found = files.load_newest(stores, stacklevel=4) if stores else None
    return None if found is None else found[1]
