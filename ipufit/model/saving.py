# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a model: taken, written and loaded."""

from __future__ import annotations

from ipufit import _env
from ipufit import checkpoint as files
from ipufit.engine import check_shapes
from ipufit.resume import TrainedState
from ipufit.types import PathLike

from .parts import Model, settings_of


def checkpoint(self: Model) -> files.Checkpoint:
    """The state now: of the model and, while `fit` runs, of the whole run.

    Returns:
        Weights, the optimiser's state, averages; in a callback also everything
        that `fit(resume=...)` needs. In `run.after_hooks` it has the state of all
        callbacks after the event.

    Raises:
        NotCompiledError: `compile` wasn't called.
    """
    if self._runs.snapshot is not None:
        return self._runs.snapshot.take()
    check_shapes(self.module)
    return trained_state(self).take()


def save(self: Model, path: PathLike) -> None:
    """Write a checkpoint: a directory of safetensors and JSON.

    The directory is written beside `path` and renamed: a whole checkpoint is there at
    any time, the old one or the new. In several processes of torch.distributed all of
    them call `save`, as `save_weights`: the first one writes, the others wait and hear
    of a failure.

    Args:
        path: A directory, which is made; a checkpoint there is replaced.

    Raises:
        NotCompiledError: `compile` wasn't called.
        CheckpointError: The checkpoint can't be written.
    """
    if _env.compile_only() is not None:  # a trained model may be there
        return
    taken = checkpoint(self)

    def write() -> str:
        files.write_checkpoint(path, taken)
        return str(path)

    files.written_by_one(write)


def load(self: Model, path: PathLike) -> None:
    """Take weights, the optimiser's state and averages from a checkpoint.

    To go on with a run use `fit(resume=path)`.

    Args:
        path: A checkpoint of the same module and optimizer.

    Raises:
        NotCompiledError: `compile` wasn't called.
        CheckpointError: The checkpoint can't be read, is damaged
            (`DamagedCheckpointError`), or isn't there (`MissingCheckpointError`).
        ConfigError: The checkpoint is of another module or optimizer.
    """
    check_shapes(self.module)
    with files.missing_allowed():
        trained_state(self).put_back(files.load_checkpoint(path))


def trained_state(model: Model) -> TrainedState:
    """The parts of a compiled model that training changes."""
    settings = settings_of(model)
    return TrainedState(model._executors, settings.optimization, settings.average)
