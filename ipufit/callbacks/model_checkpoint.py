# SPDX-License-Identifier: Apache-2.0
"""`ModelCheckpoint`: files of weights, written while `fit` runs."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from ipufit.errors import ConfigError, IpufitWarning, UnsupportedError

from .messages import say
from .monitor import MonitorCallback

SUFFIX = ".safetensors"


class ModelCheckpoint(MonitorCallback):
    """Save the weights after epochs, or after so many updates.

    As Keras's, with safetensors files, and `save_best_only` together with a number
    for `save_freq`.

    Args:
        filepath: Where to; ends with `.safetensors`. Fields are filled in: `{epoch}`
            (1-based), `{batch}` (1-based, the last update; only if `save_freq` is a
            number) and any name of the logs, as in `"best-{val_loss:.3f}.safetensors"`.
            Folders are made.
        monitor: The figure, for `save_best_only`.
        verbose: 1 says what it does.
        save_best_only: Save only if the figure improved. If it isn't in the logs, it
            warns and saves.
        save_weights_only: Must be True: whole checkpoints aren't there yet.
        mode: `"min"`, `"max"`, or `"auto"`.
        save_freq: `"epoch"`, or a number of weight updates, counted across epochs. A
            call makes several of them (`device_iterations`): it saves once, after the
            call in which the number is reached.
        initial_value_threshold: What the first value has to beat.

    Attributes:
        best: The best value so far. It outlives the run, as in Keras.

    Raises:
        ConfigError: `filepath` or `save_freq` can't be used; `filepath` has a field
            that isn't in the logs (when it is filled in). At the figure's first value,
            with `save_best_only`: `mode="auto"`, and no metric says which way it gets
            better.
        UnsupportedError: `save_weights_only=False`.

    Example:
        >>> checkpoint = ModelCheckpoint("best.safetensors", save_best_only=True)
        >>> ModelCheckpoint("best.h5")
        Traceback (most recent call last):
        ipufit.errors.ConfigError: filepath='best.h5' must end in .safetensors...
    """

    saved_attributes = ("best", "updates_since_save", "last_update")

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = True,
        mode: str = "auto",
        save_freq: int | str = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        super().__init__(monitor, mode, 0.0, initial_value_threshold)
        if not save_weights_only:
            raise UnsupportedError(
                "save_weights_only=False: ModelCheckpoint saves weights so far, not "
                "the optimizer and the rest of a run. Leave it at True."
            )
        self.filepath = os.fspath(filepath)
        if not self.filepath.endswith(SUFFIX):
            raise ConfigError(
                f"filepath={self.filepath!r} must end in {SUFFIX}: that is the format "
                "of the weights."
            )
        if save_freq != "epoch" and not _is_positive(save_freq):
            raise ConfigError(
                f"Unrecognized save_freq: {save_freq!r}. Expected save_freq are "
                "'epoch' or a number of updates, 1 or more."
            )
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.save_freq = save_freq
        self.updates_since_save = 0
        self.last_update = -1

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """A new run; what was best stays."""
        self.begin_monitoring()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Updates are numbered anew."""
        self.last_update = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Save if enough updates were made."""
        if not isinstance(self.save_freq, int):
            return
        self.updates_since_save += batch - self.last_update
        self.last_update = batch
        if self.updates_since_save >= self.save_freq:
            self.updates_since_save = 0
            self._save(self.run.epoch, logs, {"batch": batch + 1, **logs})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Save, if it is done by epochs."""
        if self.save_freq == "epoch":
            self._save(epoch, logs, logs)

    def _save(self, epoch: int, logs: dict[str, Any], fields: dict[str, Any]) -> None:
        path = self._path({**fields, "epoch": epoch + 1})
        if not self._is_due(epoch, logs, path):
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.model.save_weights(path)
        self._say(f"\nEpoch {epoch + 1}: finished saving model to {path}")

    def _path(self, fields: dict[str, Any]) -> str:
        try:
            return self.filepath.format(**fields)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f'Failed to format this callback filepath: "{self.filepath}". Reason: '
                f"{error!r}. Fields there are: {', '.join(sorted(fields))}."
            ) from error

    def _is_due(self, epoch: int, logs: dict[str, Any], path: str) -> bool:
        if not self.save_best_only:
            self._say(f"\nEpoch {epoch + 1}: saving model to {path}")
            return True
        if logs.get(self.monitor) is None:
            warnings.warn(
                f"Can save best model only with {self.monitor} available.",
                IpufitWarning,
                stacklevel=2,
            )
            return True
        value = float(logs[self.monitor])
        best = "None" if self.best is None else f"{self.best:.5f}"
        what = f"\nEpoch {epoch + 1}: {self.monitor}"
        if not self.improves(value, self.best):
            self._say(f"{what} did not improve from {best}")
            return False
        self._say(f"{what} improved from {best} to {value:.5f}, saving model to {path}")
        self.best = value
        return True

    def _say(self, message: str) -> None:
        if self.verbose > 0:
            say(message)


def _is_positive(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0
