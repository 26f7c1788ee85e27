# SPDX-License-Identifier: Apache-2.0
"""`Profiler`: where the time of some calls of a run goes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Callable

from ipufit.batching import check_count, check_positive
from ipufit.profiling import Recorder, facts_of
from ipufit.profiling.report import text_of

from .base import Callback
from .messages import say


class Profiler(Callback):
    """Record what the host does during some calls, and write it into two files.

    One is a timeline in the Chrome trace format, which `chrome://tracing` and Perfetto
    open; the other is a page that shows it in a browser by itself. A recording begins
    where the call before it has ended, with the wait for data. It ends, and is written,
    when its last call has ended; or with the run, even if that fails.

    In `fit` calls of the training count, with the validations between them; in
    `evaluate` and `predict` their own calls. Calls are counted in each run anew. A
    resumed run counts from where it goes on. Each of several processes writes files of
    its own.

    `IPUConfig(profile_dir=)` records whole runs.

    Args:
        directory: Directory of the files, which is made.
        calls: Number of calls to record.
        skip: Number of calls to leave out first.
        verbose: 1 prints the seconds of the phases and the path of the page, or why
            there are none; 0 doesn't.
        clock: Returns the time in seconds, from any origin.

    Raises:
        ConfigError: A number is no whole number, or too small.

    Example:
        >>> import tempfile, torch
        >>> from ipufit import IPUConfig, IPUModel
        >>> model = IPUModel(torch.nn.Linear(2, 1), IPUConfig(device_iterations=1))
        >>> model.compile("sgd", "mse")
        >>> x, y = torch.zeros(40, 2), torch.ones(40, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     profiler = Profiler(folder, calls=3, skip=1, verbose=0)
        ...     history = model.fit(x, y, 4, verbose=0, callbacks=profiler)
        ...     [path.name for path in profiler.paths]
        ['fit-001.trace.json', 'fit-001.html']
        >>> abs(sum(profiler.phases.values()) - profiler.seconds) < 1e-6
        True
    """

    is_saved = False
    reads_batch_logs = False
    _recorder: Recorder

    def __init__(
        self,
        directory: str | os.PathLike[str] = "profile",
        calls: int = 10,
        skip: int = 2,
        *,
        verbose: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_positive("calls", calls)
        check_count("skip", skip)
        self.num_calls = calls
        self.skip = skip
        self.verbose = verbose
        self._recorder = Recorder(directory, clock)
        self._task: str | None = None
        self._calls = 0

    @property
    def hears_every(self) -> int | None:
        """None: it records the calls that there would be without it."""
        return None

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase of the last run's recording."""
        return dict(self._recorder.timeline.phases)

    @property
    def seconds(self) -> float:
        """Length of the last run's recording, in seconds."""
        spans = self._recorder.timeline.spans
        return spans[-1].seconds if spans else 0.0

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of the last run's recording: the trace, then the page."""
        return self._recorder.paths

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Begin to count calls."""
        self._begin("fit")

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """Begin to count calls, outside `fit`."""
        self._begin("evaluate")

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        """Begin to count calls, outside `fit`."""
        self._begin("predict")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Count a call."""
        self._count("fit")

    def on_test_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Count a call, outside `fit`."""
        self._count("evaluate")

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Count a call, outside `fit`."""
        self._count("predict")

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Forget a recording without calls."""
        self._end_without_calls("fit")

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """Forget a recording without calls, outside `fit`."""
        self._end_without_calls("evaluate")

    def on_predict_end(self, logs: dict[str, Any]) -> None:
        """Forget a recording without calls, outside `fit`."""
        self._end_without_calls("predict")

    def close(self) -> None:
        """Write what was recorded until now, if the run ends within the calls.

        Say so if the run had too few calls for a recording.
        """
        if self._recorder.is_on:
            self._end()
        elif self._task is not None and self._calls <= self.skip:
            self._recorder.drop()
            self._say(f"Profiler: nothing was recorded. {self._why_nothing()}")
        self._task = None

    def _why_nothing(self) -> str:
        if not self._calls:
            return f"{self._task} ended without a call."
        return (
            f"It leaves out skip={self.skip} calls, and {self._task} ended with "
            f"{self._calls}. Give a smaller skip=, or fewer updates per call, "
            "device_iterations=."
        )

    def _say(self, text: str) -> None:
        if self.verbose and self.run.processes.is_first:
            say(text)

    def _begin(self, task: str) -> None:
        if self._task is None:  # else it is a part of the run
            self._recorder.make_directory()
            self._task, self._calls = task, 0
            self._begin_if_due()

    def _count(self, task: str) -> None:
        if self._task == task:
            self._calls += 1
            self._begin_if_due()
            if self._calls == self.skip + self.num_calls:
                self._end()

    def _begin_if_due(self) -> None:
        if self._calls == self.skip and self._task is not None:
            self._recorder.start(self._task)

    def _end_without_calls(self, task: str) -> None:
        if self._task == task and self._calls == self.skip:
            self._recorder.drop()

    def _end(self) -> None:
        if not self._recorder.is_on:
            return
        processes = self.run.processes
        facts = {**facts_of(self.model), "calls before it": self.skip}
        self._recorder.stop(processes.index, processes.count, facts)
        page = self.paths[-1]
        self._say(text_of(page.stem, self.phases))
        self._say(f"  {page}")
