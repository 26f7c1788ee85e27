# SPDX-License-Identifier: Apache-2.0
"""End a run that was stopped: exchange requests between processes, and heed signals.

Callbacks and signals ask for the end of a run (`RunState.stop`), or of an evaluation or
prediction (`stop_evaluating`, `stop_predicting`). `ProcessSync` is asked after each
call whether the loop ends there.

Events that depend on a clock, a signal or a callback of one process must take effect in
all processes at the same call. Processes exchange them after calls that all of them
know: after each call if a callback listens to calls; else every n calls, where process
0 makes n calls in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import zlib
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

from ipufit.callbacks import CallbackList
from ipufit.distributed import exchanges_off
from ipufit.engine.metric_state import MetricState, RunningSums
from ipufit.engine.program import Executors
from ipufit.errors import ConfigError
from ipufit.state import EVICTING_SIGNALS, RunState, Stop
from ipufit.types import Logs

_SECONDS_BETWEEN = 0.1
_MOST_CALLS = 1000


class ProcessSync:
    """Chooses the calls after which processes exchange metrics and requests.

    A single process needs no exchange.

    Args:
        hooks: Callbacks of the run.
        run: State of the run.
        *hook: Names of the hooks for calls.
        is_stopped: Returns whether a callback has asked to end this evaluation or
            prediction.
        facts: Returns values that must be equal in all processes, such as learning
            rates; None if there are none.

    Attributes:
        is_heard: Whether a callback of any process listens to every call.
    """

    def __init__(
        self,
        hooks: CallbackList,
        run: RunState,
        *hook: str,
        is_stopped: Callable[[], bool] = lambda: False,
        facts: Callable[[], object] = lambda: None,
    ) -> None:
        self._processes = processes = run.processes
        self._are_several = processes.are_several
        self._hooks = hooks
        self._run = run
        self._is_stopped, self._facts = is_stopped, facts
        self._last_seconds, self._last_calls = time.perf_counter(), 0
        self._calls = 0
        self._next = self._interval = 1  # calls are counted from 1
        self.is_heard = hooks.hears(*hook)
        if self._are_several:
            # All must exchange at the same calls, so one listener counts for all.
            self.is_heard = any(processes.gathered(self.is_heard))

    @property
    def _is_due(self) -> bool:
        return self.is_heard or self._calls + 1 >= self._next

    def running(
        self, metrics: MetricState, more: Callable[[], Tensor | None] = lambda: None
    ) -> Logs:
        """Return the metrics so far, over all processes; empty if not needed now.

        Args:
            metrics: Loss and metrics of this process's samples.
            more: Returns a vector to include that isn't added to the metrics yet.
        """
        if not self._are_several:
            is_wanted = self.is_heard or self._hooks.are_displays_due()
            return metrics.running(metrics.sums(more())) if is_wanted else {}
        if not self._is_due:
            return {}
        everyone = self._processes.gathered(metrics.sums(more()))
        return metrics.running(RunningSums.joined(everyone))

    def ends_fit(self, *, is_due: bool = False) -> bool:
        """Return whether `fit` ends here; save the run if a callback has asked for it.

        Args:
            is_due: Whether processes exchange requests now in any case.

        Raises:
            EvictedError: The process was told to end, and the run was saved.
        """
        run = self._run
        run.act()
        self._sync(is_due=is_due)
        if run.is_evicted:
            run.evict()
            raise EvictedError
        return run.ending is not None

    def ends_pass(self) -> bool:
        """Return whether an evaluation or prediction ends after the present call."""
        return self._sync() or self._run.is_evicted

    def _sync(self, *, is_due: bool = False) -> bool:
        """Exchange requests, if it is time; return whether the evaluation is stopped.

        A request takes effect in all processes at once.
        """
        run = self._run
        if not self._are_several:
            run.ending = run.request
            return self._is_stopped()
        if is_due:
            return self._exchange()
        is_stopped = False
        if self._is_due:
            is_stopped = self._exchange()
            self._next = self._calls + 1 + self._interval
        self._calls += 1
        return is_stopped

    def _exchange(self) -> bool:
        run, processes = self._run, self._processes
        facts = self._facts()
        digest = zlib.crc32(repr(facts).encode())
        wishes = [
            run.ending is None and run.stop_reason is not None,
            run.ending is None and run.told_by is not None,
            self._is_stopped(),
            self._next_interval() if processes.is_first else 0,
            digest,
        ]
        wanted = processes.summed(torch.tensor(wishes, dtype=torch.int64)).tolist()
        stops, evictions, is_stopped, self._interval, digests = wanted
        if digests != digest * processes.count:
            raise ConfigError(
                "The learning rates, or other numbers of the optimizer, are not the "
                f"same in all processes; in process {processes.index} they are "
                f"{facts}. Give compile() the same optimizer and schedule in each, and "
                "fit() the same callbacks."
            )
        if stops:
            reasons = processes.gathered(run.stop_reason)
            run.ending = Stop(next(reason for reason in reasons if reason is not None))
        elif evictions:
            run.ending = Stop("", is_eviction=True)
        return bool(is_stopped)

    def _next_interval(self) -> int:
        """Return the number of calls in a tenth of a second."""
        calls, self._last_calls = self._calls - self._last_calls, self._calls
        if not calls:
            return self._interval
        now = time.perf_counter()
        seconds, self._last_seconds = now - self._last_seconds, now
        wanted = calls * _SECONDS_BETWEEN / max(seconds, 1e-9)
        return max(1, min(int(wanted), 2 * self._interval, _MOST_CALLS))


class EvictedError(Exception):
    """Raised if the process was told to end; another one will resume the epoch."""


@contextlib.contextmanager
def _evicting_signals(run: RunState) -> Iterator[None]:
    """Let signals of schedulers evict a run that heeds it, inside the context.

    Python handles signals in the main thread only.
    """
    before: dict[Any, Any] = {}
    names = EVICTING_SIGNALS
    if not run.heeds_eviction or threading.current_thread() != threading.main_thread():
        names = ()
    try:
        for name in names:
            number = getattr(signal, name, None)  # Windows hasn't all of them
            if number is not None:
                before[number] = signal.signal(
                    number, lambda *_, name=name: run.stop(name, is_eviction=True)
                )
        yield
    finally:
        for number, handler in before.items():
            # None is a handler that wasn't installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def ended_in_order(
    executors: Executors, hooks: CallbackList, run: RunState
) -> Iterator[None]:
    """Handle interrupts of the loop inside the context.

    On Ctrl-C `on_train_end` gets the metrics of the last complete epoch, and the IPUs
    are released; then the interrupt continues. An eviction ends only the loop.

    Args:
        executors: The programs, whose IPUs are released.
        hooks: Callbacks of the run.
        run: State of the run.
    """
    try:
        with _evicting_signals(run):
            yield
    except EvictedError:
        pass
    except KeyboardInterrupt:
        run.ending = Stop("interrupted")
        with exchanges_off():  # other processes are elsewhere
            hooks.on_train_end(dict(run.logs))
            executors.detach()
        raise
