# SPDX-License-Identifier: Apache-2.0
"""`History`: one row of figures per epoch."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping

from ipufit._kinds import Kind, anything, count, dict_of, list_of, text

from .base import Callback


class History(Callback):
    """Figures of every epoch, which `fit` returns.

    Attributes:
        epoch: Indices of the epochs of the last `fit`.
        history: Values by name of the figure, one per epoch that had it.
        dropped_samples: Number of samples that every epoch leaves out, since they don't
            fill a call.
        coverage: The samples that the figures cover, in words; empty if all.

    Example:
        >>> history = History()
        >>> history.on_epoch_end(0, {"loss": 0.5})
        >>> history.history
        {'loss': [0.5]}
    """

    saved_attributes = ("epoch", "history", "dropped_samples", "coverage")
    saved_kinds: ClassVar[Mapping[str, Kind]] = {
        "epoch": list_of(count),
        "history": dict_of(list_of(anything)),
        "dropped_samples": count,
        "coverage": text,
    }

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}
        self.dropped_samples = 0
        self.coverage = ""

    def set_model(self, model: Any) -> None:
        """Keep no model: it keeps its history, and a circle would hold its IPUs."""

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Forget the epochs of an earlier run."""
        self.epoch = []
        self.dropped_samples = self.params.get("dropped_samples", 0)
        self.coverage = self.run.coverage

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Append the figures of the epoch."""
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
