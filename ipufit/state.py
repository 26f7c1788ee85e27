# SPDX-License-Identifier: Apache-2.0
"""The state of a run, by which callbacks stop it, and its spans in a profile."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from typing import Any, Callable, ContextManager, Iterable, Iterator, TypeVar

from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.profiler import record_function

from .distributed import Processes
from .errors import do_all
from .types import Logs

T = TypeVar("T")

logger = logging.getLogger("ipufit")

_NOTHING: ContextManager[None] = contextlib.nullcontext()

EVICTED = "SIGTERM"
"""The `stop_reason` of a run that goes on in another process."""

EVICTING_SIGNALS = ("SIGTERM", "SIGUSR1")
"""Signals by which schedulers tell a process to end: `sbatch --signal=USR1@120`."""


@dataclass(frozen=True)
class Stop:
    """A request to end a run after the present call.

    Attributes:
        reason: Why the run ends; of an eviction, the signal or callback that asks.
        is_eviction: Whether callbacks save the run first, so that another process can
            go on with it.
    """

    reason: str
    is_eviction: bool = False


@dataclass
class RunState:
    """The progress of one `fit`, `evaluate` or `predict`.

    Attributes:
        epoch: Index of the epoch, from 0.
        updates: Number of weight updates in this run.
        samples: Number of samples trained on in this run.
        coverage: The samples that metrics cover, in words; "" if all.
        params: Keras's parameters: `verbose`, `epochs`, `steps`.
        directions: `"max"` or `"min"` by the name of a metric without `val_`: which of
            it is better. Known once a program was traced.
        names: Names of the metrics in the logs of an epoch of `fit`; None if they
            aren't known, since callbacks may add others.
        calls: Calls made in this epoch.
        logs: Metrics of the last complete epoch.
        is_epoch_done: Whether the epoch's last hooks were called.
        is_finite: Whether the loss was finite so far.
        stop_evaluating: Set it to end the present evaluation after this call.
        stop_predicting: Set it to end the present prediction after this call.
        request: Request of this process to end the run; None for no request.
        ending: The request that all processes have agreed on; None while the run goes
            on.
        told_by: The signal or callback that told this process to end, so that another
            one goes on with the run; None if none did.
        processes: The processes of the run.
        is_paused: Whether other code runs between two parts of `predict(stream=True)`.
        thread: Identifier of the thread that makes the run; None before it.
        validated: Metrics of this epoch's last validation; empty before it.
        validated_calls: Number of calls in this epoch before that validation; 0 before
            it.
        metrics: The metrics that its calls add to at present; None before any do.

    Example:
        >>> run = RunState()
        >>> run.stop("the loss is small enough")
        >>> run.stop_reason
        'the loss is small enough'
    """

    epoch: int = 0
    updates: int = 0
    samples: int = 0
    coverage: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    directions: dict[str, str] = field(default_factory=dict)
    names: set[str] | None = None
    calls: int = 0
    logs: Logs = field(default_factory=dict)
    is_epoch_done: bool = False
    is_finite: bool = True
    stop_evaluating: bool = False
    stop_predicting: bool = False
    request: Stop | None = None
    ending: Stop | None = None
    told_by: str | None = None
    processes: Processes = field(default_factory=Processes)
    is_paused: bool = False
    thread: int | None = None
    validated: Logs = field(default_factory=dict)
    validated_calls: int = 0
    metrics: Any = field(default=None, repr=False)
    _on_eviction: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _actions: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch, and its count of calls to 0."""
        self.epoch, self.is_epoch_done = epoch, False
        self.validated, self.validated_calls = {}, 0

    def count_call(self, updates: int, samples: int) -> None:
        """Count a call of training."""
        self.calls += 1
        self.updates += updates
        self.samples += samples

    def end_epoch(self, logs: Logs) -> None:
        """Mark an epoch as complete, with its metrics."""
        self.calls, self.is_epoch_done, self.logs = 0, True, logs

    def stop(self, reason: str, *, is_eviction: bool = False) -> None:
        """Ask the run to end in order after the present call.

        Args:
            reason: Why the run ends. The first reason is kept, but a stop comes before
                an eviction, since no process is to go on with a run that stops.
            is_eviction: Whether callbacks save the run first, as on SIGTERM, so that
                another process can go on with it.
        """
        if is_eviction:
            self.told_by = reason
        if self.request is None or (self.request.is_eviction and not is_eviction):
            self.request = Stop(reason, is_eviction)

    def go_on(self) -> None:
        """Withdraw a stop; an eviction stays requested."""
        told_by, self.request = self.told_by, None
        if told_by is not None:
            self.stop(told_by, is_eviction=True)

    @property
    def stop_reason(self) -> str | None:
        """Why the run stops early; None while it goes on, or is just being saved."""
        stop = self.ending or self.request
        return None if stop is None or stop.is_eviction else stop.reason

    def after_hooks(self, action: Callable[[], None]) -> None:
        """Call an action after all callbacks have handled the present event.

        A checkpoint that it saves has every callback's state after this event.
        """
        self._actions.append(action)

    def act(self) -> None:
        """Call the actions of `after_hooks`, even if some fail; called by the loop."""
        actions, self._actions = self._actions, []
        if actions:
            with span("save"):
                do_all(actions)

    def on_eviction(self, action: Callable[[], None]) -> None:
        """Register an action for after the present call, if the process is evicted.

        The run then ends. Without such actions SIGTERM ends the process as usual.
        """
        self._on_eviction.append(action)

    @property
    def heeds_eviction(self) -> bool:
        """Whether there are actions for an eviction."""
        return bool(self._on_eviction)

    def evict(self) -> None:
        """Call the actions of `on_eviction`, even if some fail; called by the loop."""
        do_all(self._on_eviction)
        if self.processes.is_first:
            by = self.told_by or "another process"
            logger.warning(
                "fit() ends after update %d: %s told it to.", self.updates, by
            )
        self.ending = Stop(EVICTED)


def span(*name: str) -> ContextManager[None]:
    """Name the operations inside the context, if a profiler of torch records them.

    Args:
        *name: Parts of the name, which are joined by dots.

    Example:
        >>> from torch.profiler import ProfilerActivity, profile
        >>> with profile(activities=[ProfilerActivity.CPU]) as profiler:
        ...     with span("device call"):
        ...         pass
        >>> [event.key for event in profiler.key_averages()]
        ['device call']
    """
    # Without a profiler `record_function` takes microseconds, and the question none.
    return record_function(".".join(name)) if _profiler_enabled() else _NOTHING


def awaited(items: Iterable[T]) -> Iterator[T]:
    """Yield items, with a span around each wait.

    Example:
        >>> list(awaited([1, 2]))
        [1, 2]
    """
    iterator = iter(items)
    while True:
        with span("host data"):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
