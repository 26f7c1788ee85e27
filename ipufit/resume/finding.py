# SPDX-License-Identifier: Apache-2.0
"""Find the checkpoint of the run that a `fit` resumes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Iterator

from ipufit import checkpoint as files
from ipufit._files import as_path
from ipufit.callbacks import CallbackList
from ipufit.callbacks.base import CallbackLike
from ipufit.distributed import processes
from ipufit.errors import ConfigError
from ipufit.types import PathLike

from .checks import check_has_run, naming

AUTO = "auto"


def stores_of(callbacks: CallbackLike) -> list[tuple[Any, files.CheckpointStore]]:
    """Return the callbacks that keep checkpoints in a directory, with their stores."""
    return [
        (callback, store)
        for callback in CallbackList(callbacks).callbacks
        for store in [getattr(callback, "store", None)]
        if isinstance(store, files.CheckpointStore)
    ]


@contextlib.contextmanager
def held_directories(callbacks: CallbackLike) -> Iterator[None]:
    """Keep other runs out of the directories of callbacks."""
    with contextlib.ExitStack() as stack:
        for _, store in stores_of(callbacks):
            stack.enter_context(store.held())
        yield


def find_checkpoint(
    resume: PathLike | None, callbacks: CallbackLike
) -> files.Checkpoint | None:
    """Return the checkpoint of the run that a `fit` resumes, or None.

    Args:
        resume: A checkpoint or a directory of them; `"auto"` for the latest intact one
            of the callbacks; None for the checkpoint of a callback that resumes by
            itself.
        callbacks: Callbacks of the `fit`.

    Returns:
        None if there is no checkpoint to resume.

    Raises:
        ConfigError: `resume` is `"auto"`, and no callback saves checkpoints; the
            directory has no checkpoint; the checkpoint is of a model alone; processes
            find different checkpoints; or another run uses a callback's directory.
        CheckpointError: The checkpoint can't be read, or is damaged.
    """
    is_automatic = isinstance(resume, str) and resume == AUTO
    stores = [
        store
        for callback, store in stores_of(callbacks)
        if is_automatic or getattr(callback, "resumes", False)
    ]
    if resume is None and not stores:
        return None
    found = None
    # First of all: a checkpoint of another run doesn't fit, or is just being deleted.
    with held_directories(callbacks):
        if resume is not None and not is_automatic:
            found = _checkpoint_at(as_path(resume, "resume"))
        elif stores:
            _, found = files.load_newest(stores) or (None, None)
        else:
            raise ConfigError(
                "resume='auto' goes on from the checkpoints of a callback, and no "
                "callback keeps checkpoints in a directory of its own. Add "
                "BackupAndRestore(directory) or ModelCheckpoint(directory, keep=2), or "
                "pass the path of a checkpoint."
            )
        if found is not None:
            with naming(found):
                check_has_run(found)
        # Before process 0 gives the directories back, and deletes those it has made.
        runs = processes().gathered(None if found is None else found.state["run"])
    odd = [index for index, run in enumerate(runs) if run != runs[0]]
    if odd:
        where = ["none" if run is None else f"update {run['updates']}" for run in runs]
        raise ConfigError(
            f"Process 0 goes on from {where[0]}, and process {odd[0]} from "
            f"{where[odd[0]]}: all must read the same checkpoint. Keep checkpoints in "
            "a directory that all hosts share."
        )
    return found


def _checkpoint_at(path: Path) -> files.Checkpoint:
    """Load a checkpoint, or the newest in a directory of checkpoints."""
    is_one = (path / files.MANIFEST).exists() or not path.is_dir()
    newest = None
    if not is_one:
        newest = files.load_newest([files.CheckpointStore(path)])
    if newest is not None:
        return newest[1]
    if is_one or any(files.belongs(file.name) for file in path.iterdir()):
        return files.load_checkpoint(path)  # or raise an error that names the fault
    raise ConfigError(
        f"There is no checkpoint in {str(path)!r} to resume. {files.what_loads(path)}"
    )
