# SPDX-License-Identifier: Apache-2.0
"""The state of a run: what stops it, what callbacks may ask, its spans in a profile.

What stops a `fit` calls `RunState.stop`: a callback, `model.stop_training`, data that
ran out (`engine/loop.py`), or a signal. The loops ask `engine/stopping.py` after each
call. Only Ctrl-C and errors end a run at once. A stop takes these steps, each with an
attribute of `RunState`:

- `stop` sets `request` in this process: a `Stop` with the reason. A plain stop ends the
  run for good. An eviction saves it first, so that another process can go on with it.
- `told_by` keeps the source of an eviction, also if a plain stop replaces the request.
- After each call the processes compare requests. `ending` is the request that all of
  them follow.
- `stop_reason` is the reason of a plain stop, for users; None for an eviction that is
  under way.

In a hook, a callback may ask more: `after_hooks` and `on_eviction` (actions),
`stop_evaluating` and `stop_predicting`. What it needs of all calls it says before the
run, by the properties and `watched_gradients` of `Callback`.
"""

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

RESUMES = "the same fit goes on from it"
"""How a checkpoint is used that `resume=` or `BackupAndRestore` has read or saved."""

EVICTING_SIGNALS: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
"""Signals by which schedulers tell a process to end: `sbatch --signal=USR1@120`."""


@dataclass(frozen=True)
class Stop:
    """A request to end a run after the present call.

    Attributes:
        reason: Why the run ends; for an eviction, the name of the signal or callback.
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
        coverage: The samples that metrics cover, in words; "" if they cover all.
        params: Keras's parameters: `verbose`, `epochs`, `steps`.
        plan: The calls of an epoch of `fit`, as of `model.batch_plan`; None in other
            runs.
        directions: Whether `"max"` or `"min"` of a metric is better, by the metric's
            name without `val_`. Empty until a program was traced.
        names: Names of the metrics in the logs of an epoch of `fit`; None if they
            aren't known, since callbacks may add others.
        matrices: Names of the metrics in the logs whose values aren't single numbers.
        calls: Number of calls made in this epoch.
        logs: Metrics of the last complete epoch.
        is_epoch_done: Whether the epoch's last hooks were called.
        is_finite: Whether the loss was finite so far.
        stop_evaluating: Set this to True to end the present evaluation after its call.
        stop_predicting: Set this to True to end the present prediction after its call.
        request: Request of this process to end the run; None without a request.
        ending: The request that all processes have agreed on; None while the run goes
            on.
        told_by: Name of the signal or callback that has evicted this process; None if
            it wasn't evicted.
        processes: The processes of the run.
        saved: Path of the newest checkpoint and its number of updates, by how a later
            `fit` uses it.
        is_paused: Whether other code runs between two parts of `predict(stream=True)`.
        thread: Identifier of the thread that makes the run; None before it.
        validated: Metrics of this epoch's last validation; empty before it.
        validated_calls: Number of calls in this epoch before that validation; 0 before
            it.
        metrics: The metrics that calls of the run add to at present; None before the
            first call.

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
    plan: Any = field(default=None, repr=False)
    directions: dict[str, str] = field(default_factory=dict)
    names: set[str] | None = None
    matrices: set[str] = field(default_factory=set)
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
    saved: dict[str, tuple[Any, int]] = field(default_factory=dict, repr=False)
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
            reason: Why the run ends. The first reason is kept; but a plain stop
                replaces an eviction, since no process goes on with a run that was
                stopped.
            is_eviction: Whether callbacks save the run first, as on SIGTERM, so that
                another process can go on with it.
        """
        if is_eviction:
            self.told_by = reason
        if self.request is None or (self.request.is_eviction and not is_eviction):
            self.request = Stop(reason, is_eviction)

    def go_on(self) -> None:
        """Withdraw the request for a plain stop; an eviction stays requested."""
        told_by, self.request = self.told_by, None
        if told_by is not None:
            self.stop(told_by, is_eviction=True)
        if not self.processes.are_several:  # others agree when they exchange requests
            self.ending = self.request

    @property
    def stop_reason(self) -> str | None:
        """Why the run was stopped early; None without a stop, or during an eviction."""
        stop = self.ending or self.request
        return None if stop is None or stop.is_eviction else stop.reason

    def after_hooks(self, action: Callable[[], None]) -> None:
        """Call an action after all callbacks have handled the present event.

        A checkpoint that the action saves has the states of callbacks after the event.
        """
        self._actions.append(action)

    def act(self) -> None:
        """Call the actions of `after_hooks`, even if some fail; called by the loop."""
        actions, self._actions = self._actions, []
        if actions:
            with span("save"):
                do_all(actions)

    def on_eviction(self, action: Callable[[], None]) -> None:
        """Register an action that saves the run if the process is evicted.

        The action is called after the present call, and the run ends. If no action is
        registered, SIGTERM ends the process as usual.
        """
        self._on_eviction.append(action)

    @property
    def heeds_eviction(self) -> bool:
        """Whether an action is registered for an eviction."""
        return bool(self._on_eviction)

    @property
    def is_evicted(self) -> bool:
        """Whether all processes have agreed on an eviction, which isn't done yet."""
        return self.ending is not None and self.ending.is_eviction

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
    """Name the operations inside the context in a profile of torch.

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
    # Without a profiler, `record_function` would still take microseconds.
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
