# SPDX-License-Identifier: Apache-2.0
"""Callbacks that save weights or whole checkpoints during `fit`."""

from __future__ import annotations

import math
import os
import re
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, ClassVar, Mapping

from ipufit._arguments import check_flags, check_integer
from ipufit._files import as_path, file_errors
from ipufit._kinds import Kind, count, number, optional, whole
from ipufit.checkpoint import (
    CheckpointStore,
    SavedAt,
    write_checkpoint,
    written_by_one,
)
from ipufit.checkpoint.directory import SUFFIX
from ipufit.errors import (
    CheckpointWarning,
    ConfigError,
    IpufitWarning,
    UnsupportedError,
    warn,
)
from ipufit.state import EVICTED, RESUMES

from .base import Callback, check_frequency, numbers_in
from .monitoring import MonitorCallback, direction_of

_OTHER_SUFFIX = re.compile(r"[^.{/]\.[A-Za-z][A-Za-z0-9]*/?$")


class _FieldNames(Formatter):
    """Formats as `str.format`, also fields whose names have dots: `precision_0.3`."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        if field_name in kwargs:
            return kwargs[field_name], field_name
        return super().get_field(field_name, args, kwargs)


class SavingCallback(Callback):
    """Base of callbacks that save after epochs or updates, and when a run is evicted.

    Args:
        save_freq: `"epoch"`, or a number of updates.
    """

    saved_attributes: ClassVar[Mapping[str, Kind]] = {"updates_since_save": count}

    def __init__(self, save_freq: int | str) -> None:
        check_frequency(self, "save_freq", save_freq, "epoch")
        self.save_freq = save_freq
        self.updates_since_save = 0
        self.last_update = -1  # in the epoch
        self._updates_counted = 0
        self._saved: tuple[int, bool] | None = None

    @property
    def hears_every(self) -> int | None:
        """Return the updates between two saves, at which calls end; None for epochs."""
        return self.save_freq if isinstance(self.save_freq, int) else None

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Reset the count of updates for a new run."""
        super().on_train_begin(logs)
        self._updates_counted, self._saved = 0, None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Save if enough updates were made."""
        if isinstance(self.save_freq, int):
            self.last_update = batch
            self.updates_since_save += self.run.updates - self._updates_counted
            self._updates_counted = self.run.updates
            if self.updates_since_save >= self.save_freq:
                self.updates_since_save = 0
                self.save(self.run.epoch, logs, {"batch": batch + 1, **logs})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Save if `save_freq` is `"epoch"`."""
        if self.save_freq == "epoch":
            self.save(epoch, logs, logs)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting from the interrupted run's updates."""
        super().load_state_dict(state)
        self._updates_counted = self.run.updates

    def save(self, epoch: int, logs: dict[str, Any], fields: dict[str, Any]) -> None:
        """Save after an epoch or updates.

        Args:
            epoch: Index of the epoch.
            logs: Metrics so far.
            fields: Values for the fields of a path: metrics, and the number of updates
                in the epoch if it isn't over.
        """
        raise NotImplementedError

    def save_run(self) -> None:
        """Save the whole run, as when the process was told to end."""
        raise NotImplementedError

    @property
    def _now(self) -> tuple[int, bool]:
        """Return the number of updates, and whether the epoch is over."""
        return self.run.updates, self.run.is_epoch_done

    def _save_if_possible(self) -> None:
        if self._saved == self._now:
            return
        try:
            self.save_run()
        except (ConfigError, UnsupportedError) as error:
            warn(
                f"The run was told to end, and couldn't be saved: {error} It will go "
                "on from the checkpoint before, if there is one.",
                CheckpointWarning,
            )


class ModelCheckpoint(SavingCallback, MonitorCallback):
    """Save the run or its weights after epochs or updates.

    As in Keras, with other formats, and `save_best_only` works together with a number
    for `save_freq`. A `filepath` that ends with `.safetensors` is a file of weights.
    Any other path is a directory with a whole checkpoint, from which
    `fit(resume=filepath)` continues. It holds the state of every callback after the
    hook in which it is saved. On SIGTERM a whole checkpoint is saved too, and the run
    ends in order. With `save_best_only` and without `keep`, SIGTERM saves nothing, so
    that the best checkpoint stays. With several processes the first one writes.

    Args:
        filepath: Path that ends with `.safetensors` or has no suffix. Its fields are
            filled in: `{epoch}` (1-based), `{batch}` (1-based, the last update, only
            if `save_freq` is a number) and any name of the logs, as in
            `"best-{val_loss:.3f}.safetensors"`. Missing folders are made.
        monitor: Name of the metric for `save_best_only` and the best one of `keep`.
        verbose: 1 prints a line for each checkpoint.
        save_best_only: If True, save only if the metric improved. If callbacks of your
            own may add the metric, and the logs don't have it, save with a warning.
        save_weights_only: True for a file of weights. The suffix of `filepath` decides,
            and must agree.
        mode: `"min"`, `"max"`, or `"auto"`.
        save_freq: `"epoch"`, or a number of updates, counted across epochs. The
            checkpoint is saved after the call that reaches the number: with
            `device_iterations` a call makes several updates.
        initial_value_threshold: Value that the metric must beat first.
        keep: Number of newest whole checkpoints to keep in the directory `filepath`,
            besides the best one. `fit(resume=filepath)` continues from the newest that
            isn't damaged.

    Attributes:
        best: Best value so far. It outlives the run, as in Keras.
        store: The checkpoints in `filepath`, with `keep`.

    Raises:
        ConfigError: If `filepath` or `save_freq` can't be used; if `filepath`
            contradicts `save_weights_only` or `keep`. When `fit` begins, if the run has
            no such metric, or `filepath` has a field that isn't in the logs; if
            callbacks of your own may add to the logs, when it saves. At the metric's
            first value, with `save_best_only` or `keep`, if `mode="auto"` and the
            direction isn't known.

    Example:
        >>> checkpoint = ModelCheckpoint("best.safetensors", save_best_only=True)
        >>> checkpoint = ModelCheckpoint("run-{epoch:03d}")
        >>> checkpoint = ModelCheckpoint("checkpoints", keep=3, save_freq=1000)
        >>> ModelCheckpoint("best.h5")
        Traceback (most recent call last):
        ipufit.errors.ConfigError: filepath='best.h5': it must end in .safetensors...
    """

    saved_attributes: ClassVar[Mapping[str, Kind]] = {
        "best": optional(number),
        **SavingCallback.saved_attributes,
        "last_update": whole,
    }

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool | None = None,
        mode: str = "auto",
        save_freq: int | str = "epoch",
        initial_value_threshold: float | None = None,
        *,
        keep: int | None = None,
    ) -> None:
        MonitorCallback.__init__(
            self, monitor, mode, 0.0, verbose, initial_value_threshold
        )
        SavingCallback.__init__(self, save_freq)
        check_flags("ModelCheckpoint", save_best_only=save_best_only)
        if save_weights_only is not None:
            check_flags("ModelCheckpoint", save_weights_only=save_weights_only)
        as_path(filepath, "filepath")
        self.filepath = os.fspath(filepath)
        self.save_weights_only = _is_weights_path(self.filepath, save_weights_only)
        self.save_best_only = save_best_only
        self.store: CheckpointStore | None = None
        if keep is not None:
            _check_keep(keep, self.filepath, self.save_weights_only)
            self.store = CheckpointStore(
                self.filepath,
                keep_last=keep,
                keep_best=1,
                mode=None if self.mode == "auto" else self.mode,
            )
        self._last_moment: SavedAt | None = None

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Reset for a new run; the best value stays."""
        super().on_train_begin(logs)
        self._last_moment = None
        if self.run.names is not None:
            self._path({**self._known_fields(), "epoch": 1})
        if self.store is not None and self.mode == "auto":
            self.store.mode = direction_of(self.monitor, self.run.directions)
        is_whole = not self.save_weights_only
        if is_whole and (self.store is not None or not self.save_best_only):
            self.run.on_eviction(self._save_if_possible)

    @property
    def hears_every(self) -> int | None:
        """Return updates after which calls end, so that one ends at each save."""
        if not isinstance(self.save_freq, int):
            return None
        return math.gcd(self.save_freq, self.updates_since_save)  # it counts on

    @property
    def needs_metric(self) -> bool:
        """Whether a run without the metric is refused, as with `save_best_only`."""
        return self.save_best_only and super().needs_metric

    def _known_fields(self) -> dict[str, float]:
        names = {*(self.run.names or ())} - self.run.matrices
        if "{learning_rate" in self.filepath:  # another callback may add it
            names.add("learning_rate")
        if self.save_freq == "epoch":
            return dict.fromkeys(names, 0.0)
        of_training = (name for name in names if not name.startswith("val_"))
        return {**dict.fromkeys(of_training, 0.0), "batch": 1}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Reset the count of the epoch's updates."""
        self.last_update = -1

    @property
    def reads_batch_logs(self) -> bool:  # type: ignore[override]
        """Whether metrics are needed after each call."""
        if self.save_freq == "epoch":
            return False
        return any(not name.startswith("val_") for name in self._figures_needed)

    @property
    def _figures_needed(self) -> set[str]:
        fields = {field for _, field, _, _ in Formatter().parse(self.filepath)}
        if self.save_best_only or self.store is not None:
            fields.add(self.monitor)
        return {field for field in fields if field} - {"epoch", "batch"}

    def save(self, epoch: int, logs: dict[str, Any], fields: dict[str, Any]) -> None:
        """Save weights or the run; with `save_best_only`, only an improvement."""
        path = self._path({**fields, "epoch": epoch + 1})
        if not self._is_due(epoch, logs, path):
            return
        moment = self._moment(logs)
        if not self.save_weights_only:
            if self.store is not None and moment.value is not None:
                self.store.mode = self.known_direction()
            self.run.after_hooks(partial(self._write, epoch, path, moment))
            return
        with file_errors("can't be written", path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.model.save_weights(path, moment=moment)
        self._say_finished(epoch, path, "model.load_weights reads it")

    def save_run(self) -> None:
        """Save the whole run, as when the process was told to end."""
        epoch, moment = self.run.epoch, self._moment({})
        if self._last_moment is not None and self._last_moment.update == moment.update:
            moment = self._last_moment  # has the metric
        path = self._path({"epoch": epoch + 1, "batch": self.last_update + 1})
        self._write(epoch, path, moment)

    def _moment(self, logs: dict[str, Any]) -> SavedAt:
        """Return update, epoch and metric, by which checkpoints are compared."""
        value = self.monitored(logs)
        if value is None:
            return SavedAt(self.run.updates, self.monitor if self.store else None)
        mode = direction_of(self.monitor, self.run.directions)
        mode = mode if self.mode == "auto" else self.mode
        return SavedAt(self.run.updates, self.monitor, value, mode)

    def _write(self, epoch: int, path: str, moment: SavedAt) -> None:
        """Write a whole checkpoint."""
        now = self.model.checkpoint(copied=False)
        if self.store is not None:
            target = self.store.save(
                now,
                epoch=self.run.epoch + self.run.is_epoch_done,
                update=moment.update,
                metric=moment.value,
                monitor=moment.monitor,
            )
            path = str(target)
        else:
            written_by_one(lambda: write_checkpoint(path, now, moment=moment))
        self._last_moment, self._saved = moment, self._now
        self._say_finished(epoch, path, "fit(resume=...) goes on from it")

    def _say_finished(self, epoch: int, path: str, use: str) -> None:
        self.run.saved[use] = path, self.run.updates
        self.say(f"\nEpoch {epoch + 1}: finished saving model to {path}")

    def _path(self, fields: dict[str, Any]) -> str:
        texts = {name: v for name, v in fields.items() if isinstance(v, str)}
        fields = {**texts, **numbers_in(fields)}
        try:
            return _FieldNames().vformat(self.filepath, (), fields)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f'Failed to format this callback filepath: "{self.filepath}". Reason: '
                f"{error!r}. Fields with one number are: {', '.join(sorted(fields))}."
            ) from error

    def _is_due(self, epoch: int, logs: dict[str, Any], path: str) -> bool:
        if not self.save_best_only:
            self.say(f"\nEpoch {epoch + 1}: saving model to {path}")
            return True
        value = self.monitored(logs)
        if value is None:
            warn(
                f"Can save best model only with {self.monitor} available.",
                IpufitWarning,
            )
            return True
        best = "None" if self.best is None else f"{self.best:.5f}"
        what = f"\nEpoch {epoch + 1}: {self.monitor}"
        if not self.improves(value, self.best):
            self.say(f"{what} did not improve from {best}")
            return False
        self.say(f"{what} improved from {best} to {value:.5f}, saving model to {path}")
        self.best = value
        return True


class BackupAndRestore(SavingCallback):
    """Save the whole run, and continue the saved run when `fit` is called again.

    As in Keras, but exact: if a run is killed and the same script is started again,
    it ends with the same weights, optimizer, History and callbacks as an uninterrupted
    run. On SIGTERM, which schedulers send, the run is saved after the present call and
    ends in order. With several processes the first one writes and all read. SIGTERM in
    any process ends all.

    Args:
        backup_dir: Directory of the checkpoints, and of nothing else.
        save_freq: `"epoch"`, or a number of weight updates.
        delete_checkpoint: Delete the directory when the run is complete and every
            callback has ended without an error.
        keep_last: Number of checkpoints to keep. More than one lets a run continue if
            the newest is damaged.

    Attributes:
        store: The checkpoints.

    Raises:
        ConfigError: `save_freq` is neither `"epoch"` nor a positive number.

    Example:
        >>> import tempfile, torch
        >>> from ipufit import IPUModel
        >>> model = IPUModel(torch.nn.Linear(2, 1))
        >>> model.compile("sgd", "mse")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     backup = BackupAndRestore(folder + "/run", delete_checkpoint=False)
        ...     x, y = torch.zeros(8, 2), torch.ones(8, 1)
        ...     history = model.fit(x, y, batch_size=4, verbose=0, callbacks=backup)
        ...     len(backup.store.all())
        1
    """

    resumes = True
    reads_batch_logs = False

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: int | str = "epoch",
        *,
        delete_checkpoint: bool = True,
        keep_last: int = 2,
    ) -> None:
        super().__init__(save_freq)
        check_flags("BackupAndRestore", delete_checkpoint=delete_checkpoint)
        as_path(backup_dir, "backup_dir")
        self.store = CheckpointStore(backup_dir, keep_last=keep_last)
        self.delete_checkpoint = delete_checkpoint

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Register a save for when the process is evicted."""
        super().on_train_begin(logs)
        self.updates_since_save = 0
        self.run.on_eviction(self._save_if_possible)

    def save(self, epoch: int, logs: dict[str, Any], fields: dict[str, Any]) -> None:
        """Save the whole run, once all callbacks have handled the event."""
        self.run.after_hooks(self.save_run)

    def save_run(self) -> None:
        """Save the whole run."""
        self._saved = self._now
        complete = self.run.epoch + self.run.is_epoch_done
        now = self.model.checkpoint(copied=False)
        path = self.store.save(now, epoch=complete, update=self.run.updates)
        self.run.saved[RESUMES] = path, self.run.updates

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Delete the backup after a complete run, if `delete_checkpoint`.

        The backup stays if SIGTERM came too late to end the run: the script may be
        killed before it uses the result.
        """
        run = self.run
        is_cut = run.stop_reason in (EVICTED, "interrupted")
        if not is_cut:
            is_cut = any(run.processes.gathered(run.told_by is not None))
        if self.delete_checkpoint and not is_cut:
            run.after_hooks(self._clear)

    def _clear(self) -> None:
        self.run.processes.barrier()  # every process has ended well
        self.store.clear()


def _is_weights_path(filepath: str, weights_only: bool | None) -> bool:
    """Return whether the suffix of a path is that of a weights file."""
    is_file = filepath.endswith(SUFFIX)
    is_other = not is_file and _OTHER_SUFFIX.search(filepath) is not None
    if is_other or weights_only not in (None, is_file):
        end = "" if weights_only is None else f", but save_weights_only={weights_only}"
        raise ConfigError(
            f"filepath={filepath!r}{end}: it must end in {SUFFIX} for weights, "
            "and have no suffix for a whole checkpoint, which is a directory."
        )
    return is_file


def _check_keep(keep: Any, filepath: str, is_of_weights: bool) -> None:
    check_integer("keep", keep, least=1, of="ModelCheckpoint")
    if is_of_weights or "{" in filepath:
        raise ConfigError(
            f"keep={keep} makes filepath={filepath!r} a directory of checkpoints: it "
            f"can't have fields or end in {SUFFIX}."
        )
