# SPDX-License-Identifier: Apache-2.0
"""Agreement of processes on the metrics to show, and on the end of a run.

Events that depend on a clock, a signal or a callback of one process must take effect in
all processes at the same call. Processes exchange them after calls that all of them
know: after each call if a callback listens to calls; else every n calls, where process
0 makes n calls in a tenth of a second.
"""

from __future__ import annotations

import time
import zlib
from typing import Callable

import torch
from torch import Tensor

from ipufit.callbacks import CallbackList
from ipufit.distributed import Processes
from ipufit.engine.metric_state import Figures, Sums
from ipufit.errors import ConfigError
from ipufit.state import RunState
from ipufit.types import Logs

_SECONDS_BETWEEN = 0.1
_MOST_CALLS = 1000


class ProcessSync:
    """Chooses the calls after which processes exchange metrics and requests.

    A single process needs no exchange.

    Args:
        processes: The processes of the run.
        hooks: Callbacks of the run.
        run: State of the run.
        hook: Names of the hooks for calls.
        clock: Returns the time in seconds; process 0's is used.
        facts: Returns values that must be equal in all processes, such as learning
            rates; None if there are none.

    Attributes:
        is_heard: Whether a callback of any process listens to every call.
    """

    def __init__(
        self,
        processes: Processes,
        hooks: CallbackList,
        run: RunState,
        *hook: str,
        clock: Callable[[], float] = time.perf_counter,
        facts: Callable[[], object] | None = None,
    ) -> None:
        self._processes = processes
        self._hooks = hooks
        self._run = run
        self._clock = clock
        self._facts = facts
        self._ends_evaluation = self._ends_prediction = False
        self._last_seconds, self._last_calls = clock(), 0
        self._calls = 0
        self._next = self._interval = 1  # calls are counted from 1
        self.is_heard = hooks.hears(*hook)
        if processes.are_several:
            # All must exchange at the same calls, so one listener counts for all.
            self.is_heard = any(processes.gathered(self.is_heard))

    @property
    def _is_due(self) -> bool:
        return self.is_heard or self._calls + 1 >= self._next

    def running(
        self, figures: Figures, more: Callable[[], Tensor | None] = lambda: None
    ) -> Logs:
        """Return the metrics so far, over all processes; empty if not needed now.

        Args:
            figures: Loss and metrics of this process's samples.
            more: Returns a vector to include, though it isn't added yet.
        """
        if not self._processes.are_several:
            is_wanted = self.is_heard or self._hooks.are_displays_due()
            return figures.running(figures.sums(more())) if is_wanted else {}
        if not self._is_due:
            return {}
        everyone = self._processes.gathered(figures.sums(more()))
        return figures.running(Sums.joined(everyone))

    def sync(self) -> None:
        """Exchange requests to end a run, if an exchange is due.

        Called after each call.
        """
        if self._processes.are_several:
            if self._is_due:
                self.sync_now()
                self._next = self._calls + 1 + self._interval
            self._calls += 1

    def sync_now(self) -> None:
        """Exchange requests to end a run, so that they take effect in all processes."""
        run, processes = self._run, self._processes
        if not processes.are_several:
            return
        digest = self._digest()
        wishes = [
            run.is_stopping and not run.is_ending,
            run.was_told_to_end and not run.is_evicted,
            run.stop_evaluating,
            run.stop_predicting,
            self._next_interval() if processes.is_first else 0,
            digest,
        ]
        wanted = processes.summed(torch.tensor(wishes, dtype=torch.int64)).tolist()
        stops, evictions, evaluating, predicting, self._interval, digests = wanted
        if digests != digest * processes.count:
            raise ConfigError(
                "The learning rates, or other numbers of the optimizer, are not the "
                f"same in all processes; in process {processes.index} they are "
                f"{self._facts and self._facts()}. Pass the same callbacks in each."
            )
        if stops:
            reasons = processes.gathered(run.stop_reason)
            run.end(next(reason for reason in reasons if reason is not None))
        run.is_evicted = run.is_evicted or bool(evictions)
        self._ends_evaluation, self._ends_prediction = (
            bool(evaluating),
            bool(predicting),
        )

    @property
    def ends_evaluation(self) -> bool:
        """Whether the evaluation ends after the present call, in all processes."""
        several = self._processes.are_several
        return self._ends_evaluation if several else self._run.stop_evaluating

    @property
    def ends_prediction(self) -> bool:
        """Whether the prediction ends after the present call, in all processes."""
        several = self._processes.are_several
        return self._ends_prediction if several else self._run.stop_predicting

    def _digest(self) -> int:
        facts = None if self._facts is None else self._facts()
        return zlib.crc32(repr(facts).encode())

    def _next_interval(self) -> int:
        """Return the number of calls in a tenth of a second."""
        calls, self._last_calls = self._calls - self._last_calls, self._calls
        if not calls:
            return self._interval
        now = self._clock()
        seconds, self._last_seconds = now - self._last_seconds, now
        wanted = calls * _SECONDS_BETWEEN / max(seconds, 1e-9)
        return max(1, min(int(wanted), 2 * self._interval, _MOST_CALLS))
