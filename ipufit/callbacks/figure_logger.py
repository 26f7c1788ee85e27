# SPDX-License-Identifier: Apache-2.0
"""What callbacks share that hand figures to something else: when, and from where on."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Mapping

from ipufit._kinds import Kind, count
from ipufit.errors import ConfigError

from .base import Callback


class FigureLogger(Callback, abc.ABC):
    """Base of callbacks that hand on the figures of epochs, and of calls if asked to.

    Leaves say how to `open`, and how to write.

    Args:
        update_freq: `"epoch"`: figures of epochs only. A number n: also those of the
            epoch so far, after the call in which every n-th update was made; `"batch"`
            is 1.

    Attributes:
        updates: Made since `fit` began.

    Raises:
        ConfigError: `update_freq` is something else.
    """

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
        self._first_update = 0

    @abc.abstractmethod
    def open(self) -> None:
        """Training is about to begin, or goes on; called again and again."""

    @abc.abstractmethod
    def write_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Hand on the figures of an epoch (0-based)."""

    @abc.abstractmethod
    def write_updates(self, logs: dict[str, Any]) -> None:
        """Hand on the figures of the epoch so far, after `updates`."""

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """A new run: updates are counted anew."""
        self.updates = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """By now a resumed run has its state."""
        self.open()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """A call begins."""
        self.open()
        self._first_update = batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Count its updates, and write if it is time."""
        before = self.updates
        self.updates += batch - self._first_update + 1
        if self._every and self.updates // self._every > before // self._every:
            self.write_updates(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Write."""
        self.write_epoch(epoch, logs)
