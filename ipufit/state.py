# SPDX-License-Identifier: Apache-2.0
"""The state of a run, which callbacks read, and through which they end it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

from ._failures import do_all
from ._spans import span
from .distributed import Processes
from .types import Logs

EVICTED = "SIGTERM"
"""The `stop_reason` of a run that goes on in another process."""


@dataclass
class RunState:
    """The progress of one `fit`, `evaluate` or `predict`.

    Attributes:
        epoch: 0-based.
        updates: Weight updates so far, in this run.
        samples: Samples trained on so far, in this run.
        stop_reason: Why the run stops early; None while it goes on.
        coverage: Which samples the figures are about; empty if about all.
        params: Keras's parameters: `verbose`, `epochs`, `steps`.
        directions: `"max"` or `"min"` for figures of which more or less is better, by
            name without `val_`; known once a program was traced.
        calls: Calls made in this epoch.
        logs: Figures of the last complete epoch.
        is_epoch_done: Whether the epoch's last hooks were called.
        is_finite: Whether the loss was finite so far.
        stop_evaluating: Set it to end the evaluation under way after this call.
        stop_predicting: Set it to end the prediction under way after this call.
        is_evicted: Whether the run was told to end (SIGTERM), in all its processes.
        was_told_to_end: Whether this process was; the others may not know yet.
        processes: The processes that the run has.
        validated: Figures of this epoch's last validation; empty before it.
        validated_calls: Calls that this epoch had made then; 0 before.

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
    was_told_to_end: bool = False
    processes: Processes = field(default_factory=Processes)
    validated: Logs = field(default_factory=dict)
    validated_calls: int = 0
    _is_ending: bool = field(default=False, repr=False)
    _on_eviction: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _actions: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def begin_epoch(self, epoch: int) -> None:
        """Count the calls of a new epoch."""
        self.epoch, self.is_epoch_done = epoch, False
        self.validated, self.validated_calls = {}, 0

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

    def end(self, reason: str) -> None:
        """End after the call under way: all processes have agreed on it."""
        self.stop_reason, self._is_ending = reason, True

    def tell_to_end(self) -> None:
        """Note that this process was told to end; one without others ends its run."""
        self.was_told_to_end = True
        self.is_evicted = self.is_evicted or not self.processes.are_several

    def after_hooks(self, action: Callable[[], None]) -> None:
        """Have an action done once all callbacks have heard of the event under way.

        A checkpoint that it saves has every callback's state as of this event.
        """
        self._actions.append(action)

    def act(self) -> None:
        """Do the actions of `after_hooks`, though one fails; called by the loop."""
        actions, self._actions = self._actions, []
        if actions:
            with span("save"):
                do_all(actions)

    def on_eviction(self, action: Callable[[], None]) -> None:
        """Have an action done, after the call under way, if the process is evicted.

        The run ends then. Without such actions SIGTERM ends the process as usual.
        """
        self._on_eviction.append(action)

    @property
    def heeds_eviction(self) -> bool:
        """Whether an eviction has actions to do."""
        return bool(self._on_eviction)

    def heed_eviction(self) -> None:
        """Save and stop, if the process was told to end; called by the loop."""
        if self.is_evicted and not self.is_ending:
            do_all(self._on_eviction)
            self.end(EVICTED)

    @property
    def is_stopping(self) -> bool:
        """Whether this process wants the run to end after the call under way."""
        return self.stop_reason is not None

    @property
    def is_ending(self) -> bool:
        """Whether the run ends after the call under way, in all its processes."""
        return self._is_ending if self.processes.are_several else self.is_stopping
