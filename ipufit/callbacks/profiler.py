# SPDX-License-Identifier: Apache-2.0
"""`Profiler`: a recording of where the time of some calls goes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from ipufit._files import as_path, file_errors
from ipufit._spans import is_recorded
from ipufit.batching import check_count, check_positive
from ipufit.errors import ConfigError

from .base import Callback, say

_ROWS = 15  # of the table


class Profiler(Callback):
    """Record what the host does during some calls, by `torch.profiler`.

    It writes a timeline in the Chrome trace format, which `chrome://tracing` and
    Perfetto open, and prints a table of what took the most time. Both have the
    operators of torch, and a run's own spans: waits for data, device calls,
    compilations, copies of weights, metrics, the optimizer, hooks of callbacks.

    A recording begins at the end of the call before it, with the wait for data. It
    ends, and is written, after its last call or with the run, even if the run fails. In
    `fit` it counts training calls, and includes the validations between them. In
    `evaluate` and `predict` it counts their own calls. Each run counts its calls anew,
    and a resumed run counts from where it goes on. With several processes each writes
    files of its own.

    Args:
        directory: Directory of the files, which is made.
        calls: Number of calls to record.
        skip: Number of calls to leave out first.
        verbose: 1 prints the table and the path of the trace, or why there are none; 0
            doesn't.

    Attributes:
        path: The trace of the last run; None if there is none.
        profile: The recording of the last run, a `torch.profiler.profile`; None if
            there is none.

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
        ...     profiler.path.name
        'fit-001.trace.json'
        >>> events = profiler.profile.key_averages()
        >>> [event.count for event in events if event.key == "device call"]
        [3]
    """

    is_saved = False
    reads_batch_logs = False

    def __init__(
        self,
        directory: str | os.PathLike[str] = "profile",
        calls: int = 10,
        skip: int = 2,
        *,
        verbose: int = 1,
    ) -> None:
        check_positive("calls", calls)
        check_count("skip", skip)
        self.directory = as_path(directory, "directory")
        self.num_calls = calls
        self.skip = skip
        self.verbose = verbose
        self.path: Path | None = None
        self.profile: profile | None = None
        self._task: str | None = None
        self._calls = 0
        self._is_on = False

    @property
    def hears_every(self) -> int | None:
        """Return None: the profiler doesn't change the length of calls."""
        return None

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Start counting calls."""
        self._begin("fit")

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """Start counting calls, outside `fit`."""
        self._begin("evaluate")

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        """Start counting calls, outside `fit`."""
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

    def close(self) -> None:
        """Write the recording so far, if the run has ended before its last call.

        Print a line if the run had too few calls for a recording.
        """
        if self._is_on and self._calls > self.skip:
            self._end()
        elif self._task is not None and self._calls <= self.skip:
            if self._is_on and self.profile is not None:
                self.profile.stop()  # type: ignore[no-untyped-call]
            self._is_on, self.profile = False, None
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
        if self._task is not None:  # it is a part of the run
            return
        with file_errors("can't be made", self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
        self._task, self._calls = task, 0
        self.path, self.profile = None, None
        self._start_if_due()

    def _count(self, task: str) -> None:
        if self._task != task:
            return
        self._calls += 1
        self._start_if_due()
        if self._is_on and self._calls == self.skip + self.num_calls:
            self._end()

    def _start_if_due(self) -> None:
        if self._calls != self.skip:
            return
        if is_recorded():
            raise ConfigError(
                "Profiler can't record while another profiler of torch does: leave "
                "one of them out."
            )
        # Else torch writes lines about its own profiler to the terminal.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self.profile = profile(activities=[ProfilerActivity.CPU])
        self.profile.start()  # type: ignore[no-untyped-call]
        self._is_on = True

    def _end(self) -> None:
        recorded, self._is_on = self.profile, False
        if recorded is None:
            return
        recorded.stop()  # type: ignore[no-untyped-call]
        processes, number = self.run.processes, 0
        suffix = f".process-{processes.index}" if processes.are_several else ""
        with file_errors("can't be written", self.directory):
            while self.path is None:
                number += 1
                name = f"{self._task}-{number:03}{suffix}.trace.json"
                with contextlib.suppress(FileExistsError):
                    (self.directory / name).touch(exist_ok=False)  # the name is ours
                    self.path = self.directory / name
            recorded.export_chrome_trace(str(self.path))
        averages = recorded.key_averages()
        self._say(averages.table(sort_by="cpu_time_total", row_limit=_ROWS))
        self._say(f"  {self.path}")
