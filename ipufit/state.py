# SPDX-License-Identifier: Apache-2.0
"""Where a run stands: what callbacks read, and how they stop it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

from ._failures import do_all
from .types import Logs

EVICTED = "SIGTERM"
"""The reason to stop of a run that is to go on elsewhere."""


@dataclass
class RunState:
    """The progress of one `fit`, `evaluate` or `predict`.

    Attributes:
        epoch: 0-based.
        updates: Weight updates so far, in this run.
        samples: Samples trained on so far, in this run.
        stop_reason: Why it shall stop; None while it shall not.
        coverage: Which samples the figures are about; empty if about all.
        params: Keras's: `verbose`, `epochs`, `steps`.
        directions: `"max"` or `"min"` for figures of which more or less is better, by
            their names without `val_`; filled once a program was traced.
        calls: Calls made in this epoch.
        logs: Figures of the last complete epoch.
        is_epoch_done: Whether the epoch's last hooks were called.
        is_finite: Whether the loss was, so far.
        stop_evaluating: Set it to end the evaluation under way after this call.
        stop_predicting: The same for a prediction.
        is_evicted: Whether the process was told to end (SIGTERM).

    Example:
        >>> run = RunState()
        >>> run.stop("the loss is small enough")
        >>> run.is_stopping
        True
    """

    epoch: int = 0
    updates: int = 0
    samples: int = 0
    stop_reason: str | None = None
    coverage: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    directions: dict[str, str] = field(default_factory=dict)
    calls: int = 0
    logs: Logs = field(default_factory=dict)
    is_epoch_done: bool = False
    is_finite: bool = True
    stop_evaluating: bool = False
    stop_predicting: bool = False
    is_evicted: bool = False
    _on_eviction: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _actions: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def begin_epoch(self, epoch: int) -> None:
        """Count the calls of a new epoch."""
        self.epoch, self.is_epoch_done = epoch, False

    def count_call(self, updates: int, samples: int) -> None:
        """Count a call of training."""
        self.calls += 1
        self.updates += updates
        self.samples += samples

    def end_epoch(self, logs: Logs) -> None:
        """Have an epoch complete, with its figures."""
        self.calls, self.is_epoch_done, self.logs = 0, True, logs

    def stop(self, reason: str) -> None:
        """Ask the run to end in order; the first reason is kept."""
        if self.stop_reason is None:
            self.stop_reason = reason

    def after_hooks(self, action: Callable[[], None]) -> None:
        """Have something done once all callbacks have heard of the event under way.

        What is saved then has every callback's state as of this event.
        """
        self._actions.append(action)

    def act(self) -> None:
        """Do all that was asked for, though one fails; called by the loop."""
        actions, self._actions = self._actions, []
        do_all(actions)

    def on_eviction(self, action: Callable[[], None]) -> None:
        """Have something saved if the process is told to end, after the call under way.

        The run ends then. Nobody listens to the signal unless somebody asks for this.
        """
        self._on_eviction.append(action)

    @property
    def heeds_eviction(self) -> bool:
        """Whether somebody asked."""
        return bool(self._on_eviction)

    def heed_eviction(self) -> None:
        """Save and stop, if the process was told to end; called by the loop."""
        if self.is_evicted and not self.is_stopping:
            do_all(self._on_eviction)  # one that fails takes no other with it
            self.stop(EVICTED)

    @property
    def is_stopping(self) -> bool:
        """Whether somebody asked."""
        return self.stop_reason is not None
