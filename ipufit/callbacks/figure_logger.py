# SPDX-License-Identifier: Apache-2.0
"""Base classes of callbacks that send metrics to other services."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Mapping

from ipufit._kinds import Kind, count, optional, text
from ipufit.errors import ConfigError

from .base import Callback


class FigureLogger(Callback, abc.ABC):
    """Base of callbacks that log the metrics of epochs, and of calls on request.

    Args:
        update_freq: `"epoch"` for the figures of epochs only. A number n for those of
            the epoch so far too, after each call that makes an n-th update. `"batch"`
            is the same as 1.

    Attributes:
        updates: Number of updates since `fit` began.

    Raises:
        ConfigError: If `update_freq` has another value.
    """

    writes_for_all = True
    saved_attributes: ClassVar[tuple[str, ...]] = ("updates",)
    saved_kinds: ClassVar[Mapping[str, Kind]] = {"updates": count}

    def __init__(self, update_freq: int | str) -> None:
        every = 1 if update_freq == "batch" else update_freq
        is_number = isinstance(every, int) and not isinstance(every, bool)
        if every != "epoch" and not (is_number and every > 0):  # type: ignore[operator]
            raise ConfigError(
                f"update_freq={update_freq!r} is none of 'epoch', 'batch' and a number "
                "of updates, 1 or more."
            )
        self.update_freq = update_freq
        self.updates = 0
        self._every = every if isinstance(every, int) else None
        self.reads_batch_logs = self._every is not None
        self._first_update = 0

    @property
    def hears_every(self) -> int | None:
        """Return the updates between two logs, at which calls end."""
        return self._every

    @abc.abstractmethod
    def open(self) -> None:
        """Connect to the service; called before each epoch and call."""

    @abc.abstractmethod
    def write_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Log the metrics of an epoch (0-based)."""

    @abc.abstractmethod
    def write_updates(self, logs: dict[str, Any]) -> None:
        """Log the metrics of the epoch so far, at the number `updates`."""

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Set the count of updates to 0."""
        self.updates = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Connect to the service; a resumed run has its state by now."""
        self.open()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Connect to the service, for a run resumed inside an epoch."""
        self.open()
        self._first_update = batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Count the call's updates, and log metrics every `update_freq` updates."""
        before = self.updates
        self.updates += batch - self._first_update + 1
        if self._every and self.updates // self._every > before // self._every:
            self.write_updates(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Log the metrics of the epoch."""
        self.write_epoch(epoch, logs)


class RunLogger(FigureLogger):
    """Base of loggers for services with runs: join the active run, or begin one.

    A run that the logger begins ends with `fit`, as failed if `fit` raised. A resumed
    `fit` continues it.

    Args:
        arguments: Arguments for the service's function that begins a run.

    Attributes:
        run_id: Id of the run that the logger began; None if it began none.
    """

    saved_attributes = ("updates", "run_id")
    saved_kinds: ClassVar[Mapping[str, Kind]] = {
        "updates": count,
        "run_id": optional(text),
    }

    def __init__(self, update_freq: int | str, arguments: dict[str, Any]) -> None:
        super().__init__(update_freq)
        self.arguments = arguments
        self.run_id: str | None = None
        self._active: Any = None
        self._is_own = False

    @abc.abstractmethod
    def active_run(self) -> Any:
        """Return the service's active run, or None."""

    @abc.abstractmethod
    def begin_run(self) -> Any:
        """Begin a run, or continue the run of `run_id`, and return the run."""

    @abc.abstractmethod
    def end_run(self, *, is_failed: bool) -> None:
        """End the run that `begin_run` began."""

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Forget the run that an earlier `fit` began."""
        super().on_train_begin(logs)
        self.run_id = None

    def open(self) -> None:
        """Join the active run, or begin one."""
        if self._active is None:
            self._active = self.active_run()
            self._is_own = self._active is None
            if self._is_own:
                self._active = self.begin_run()

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """End the run, if the logger began it."""
        self._leave(is_failed=False)

    def close(self) -> None:
        """End the run as failed, if an error prevented `on_train_end`."""
        self._leave(is_failed=True)

    def _leave(self, *, is_failed: bool) -> None:
        if self._is_own:
            self.end_run(is_failed=is_failed)
        self._active, self._is_own = None, False
