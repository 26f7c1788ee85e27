# SPDX-License-Identifier: Apache-2.0
"""`Throughput`: samples per second, and milliseconds per call."""

from __future__ import annotations

import time
from typing import Any, Callable, ClassVar, Mapping

from ipufit._kinds import Kind, count, dict_of, number
from ipufit.errors import ConfigError
from ipufit.types import Verbose

from .base import Callback, say

TRAINING, EVALUATION, PREDICTION = "training", "evaluation", "prediction"


def throughput_line(samples_per_second: float) -> str:
    """Format the line that `benchmarks.yml` files of Graphcore's examples look for.

    Args:
        samples_per_second: Samples of all processes per second.

    Example:
        >>> throughput_line(1234.567)
        'throughput: 1234.6 samples/sec'
        >>> throughput_line(0.01234567)
        'throughput: 0.012346 samples/sec'
    """
    shown = format(samples_per_second, ".1f" if samples_per_second >= 100 else ".5g")
    return f"throughput: {shown} samples/sec"


class Throughput(Callback):
    """Measure samples per second in training, and the time of a call.

    At the end of every epoch it adds two values to the logs, for later callbacks and
    History:

    - `samples_per_second`: real samples (no padding) divided by the seconds from the
      beginning of the epoch to its last call. Loading data and the callbacks between
      calls count; building programs and validation don't.
    - `latency_ms`: mean milliseconds from a call's data being ready to its results
      being ready.

    It also prints a line, `throughput: 1234.5 samples/sec`, which existing
    `benchmarks.yml` files find by their regular expressions.

    With several processes it counts the samples of all. Process 0 takes the times and
    prints.

    Args:
        verbose: 1 prints the line after every epoch, 0 doesn't, "auto" does where `fit`
            shows anything.
        clock: Returns the time in seconds, from any origin.

    Raises:
        ConfigError: `verbose` is something else.

    Attributes:
        latencies_ms: Mean milliseconds per call of the last epoch (`"training"`), the
            last `"evaluation"`, which may be a validation, and `"prediction"`.

    Example:
        >>> from ipufit.state import RunState
        >>> throughput = Throughput(clock=iter([0.0, 1.0, 3.0]).__next__)
        >>> throughput.set_run(RunState())
        >>> throughput.on_epoch_begin(0, {})
        >>> throughput.on_train_batch_begin(0, {})
        >>> throughput.run.samples += 600
        >>> throughput.on_train_batch_end(0, {})
        >>> logs = {}
        >>> throughput.on_epoch_end(0, logs)
        >>> logs
        {'samples_per_second': 200.0, 'latency_ms': 2000.0}
    """

    reads_batch_logs = False
    saved_attributes: ClassVar[Mapping[str, Kind]] = {
        "epoch_seconds": number,
        "epoch_samples": count,
        "latencies_ms": dict_of(number),
        "calls": dict_of(count),
    }

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        verbose: Verbose = "auto",
    ) -> None:
        if verbose not in ("auto", 0, 1):
            raise ConfigError(
                f"verbose={verbose!r}: Throughput prints a line after every epoch (1), "
                "or not (0), or as fit does ('auto')."
            )
        self.verbose = verbose
        self._clock = clock
        self._since: float | None = None
        self._call_began = 0.0
        self._samples_before = 0
        self.epoch_seconds = 0.0
        self.epoch_samples = 0
        self.latencies_ms: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    @property
    def hears_every(self) -> int | None:
        """Return None: measuring doesn't change the length of calls."""
        return None

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Reset the values of an earlier run."""
        self._since = None
        self._begin_epoch()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Start the clock of the epoch."""
        self._begin_epoch()
        self._since = self._clock()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Start the clock of the call."""
        self._call_began = self._clock()
        if self._since is None:  # resumed inside an epoch, or after a validation
            self._since = self._call_began
        self._samples_before = self.run.samples

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Add the call's samples and its time."""
        now = self._clock()
        if self._since is not None:
            self.epoch_seconds += now - self._since
        self._since = now
        self.epoch_samples += self.run.samples - self._samples_before
        self._add_call(TRAINING, now)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Add both values to the logs."""
        if self.calls.get(TRAINING):
            rate = self.epoch_samples / max(self.epoch_seconds, 1e-9)
            measured = rate, self.latencies_ms[TRAINING]
            rate, latency = self.run.processes.first(measured)
            logs["samples_per_second"], logs["latency_ms"] = rate, latency
            if self._prints() and self.run.processes.is_first:
                say(throughput_line(rate))

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """Reset the mean over calls, and stop the clock of the epoch.

        The next training call starts the clock again.
        """
        self.calls[EVALUATION] = 0
        self._since = None

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        """Reset the mean over calls."""
        self.calls[PREDICTION] = 0

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Start the clock of the call."""
        self._call_began = self._clock()

    on_predict_batch_begin = on_test_batch_begin

    def on_test_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Add the call's time."""
        self._add_call(EVALUATION, self._clock())

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Add the call's time."""
        self._add_call(PREDICTION, self._clock())

    def _prints(self) -> bool:
        if self.verbose == "auto":
            return bool(self.params.get("verbose", 0))
        return bool(self.verbose)

    def _begin_epoch(self) -> None:
        self.epoch_seconds, self.epoch_samples = 0.0, 0
        self.calls[TRAINING] = 0

    def _add_call(self, task: str, now: float) -> None:
        """Add the call that ends now to the mean of a task."""
        milliseconds = 1e3 * (now - self._call_began)
        count = self.calls[task] = self.calls.get(task, 0) + 1
        mean = self.latencies_ms.get(task, 0.0) if count > 1 else 0.0
        self.latencies_ms[task] = mean + (milliseconds - mean) / count
