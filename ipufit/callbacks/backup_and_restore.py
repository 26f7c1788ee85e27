# SPDX-License-Identifier: Apache-2.0
"""`BackupAndRestore`: continue a run that was killed."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Mapping

from ipufit._kinds import Kind, count
from ipufit.checkpoint import CheckpointStore
from ipufit.errors import ConfigError, UnsupportedError
from ipufit.state import EVICTED

from .base import Callback
from .messages import warn_of_unsaved_eviction


class BackupAndRestore(Callback):
    """Save the whole run, and continue the saved run when `fit` is called again.

    As in Keras, but exactly: a run that was killed and started again by the same script
    ends with the same weights, optimiser, History and callbacks as one that wasn't. On
    SIGTERM, with which schedulers evict, it saves after the present call and ends the
    run in order. Of several processes the first writes and all read; SIGTERM in any of
    them ends all.

    Args:
        backup_dir: Directory of the checkpoints, and of nothing else.
        save_freq: `"epoch"`, or a number of weight updates.
        delete_checkpoint: Delete the directory when the run is complete and every
            callback has ended without an error.
        keep_last: Number of checkpoints to keep. More than one lets a run continue if
            the
            newest is damaged.

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

    saved_attributes = ("updates_since_save",)
    saved_kinds: ClassVar[Mapping[str, Kind]] = {"updates_since_save": count}
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
        is_count = isinstance(save_freq, int) and not isinstance(save_freq, bool)
        if save_freq != "epoch" and not (is_count and int(save_freq) > 0):
            raise ConfigError(
                f"save_freq={save_freq!r} is neither 'epoch' nor a number of updates, "
                "1 or more."
            )
        self.store = CheckpointStore(backup_dir, keep_last=keep_last)
        self.save_freq = save_freq
        self.delete_checkpoint = delete_checkpoint
        self.updates_since_save = 0
        self._updates_counted = 0
        self._saved: tuple[int, bool] | None = None

    @property
    def hears_every(self) -> int | None:
        """Return `save_freq` if it is a number, so that calls end where it saves."""
        return None if self.save_freq == "epoch" else int(self.save_freq)

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Register a save for when the process is evicted."""
        self.updates_since_save = self._updates_counted = 0
        self._saved = None
        self.run.on_eviction(self._save_if_possible)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Save if enough updates were made."""
        self.updates_since_save += self.run.updates - self._updates_counted
        self._updates_counted = self.run.updates
        if self.save_freq != "epoch" and self.updates_since_save >= int(self.save_freq):
            self.updates_since_save = 0
            self.run.after_hooks(self._save)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Save if `save_freq` is `"epoch"`."""
        if self.save_freq == "epoch":
            self.updates_since_save = 0
            self.run.after_hooks(self._save)

    def load_state_dict(self, state: Any) -> None:
        """Continue counting from the interrupted run's updates."""
        super().load_state_dict(state)
        self._updates_counted = self.run.updates

    def _save(self) -> None:
        run = self.run
        self._saved = run.updates, run.is_epoch_done
        complete = run.epoch + run.is_epoch_done
        self.store.save(self.model.checkpoint(), epoch=complete, update=run.updates)

    def _save_if_possible(self) -> None:
        if self._saved == (self.run.updates, self.run.is_epoch_done):
            return
        try:
            self._save()
        except UnsupportedError as error:
            warn_of_unsaved_eviction(error)

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Delete the backup after a complete run, if `delete_checkpoint`.

        It stays if SIGTERM came too late to be heeded: the script may be killed before
        it uses the result.
        """
        run = self.run
        is_cut = run.is_evicted or run.stop_reason in (EVICTED, "interrupted")
        if not is_cut and run.processes.are_several:
            is_cut = any(run.processes.gathered(run.was_told_to_end))
        if self.delete_checkpoint and not is_cut:
            run.after_hooks(self._clear)

    def _clear(self) -> None:
        self.run.processes.barrier()  # every process has ended well
        self.store.clear()
