# SPDX-License-Identifier: Apache-2.0
"""Callbacks that measure: throughput, and norms of gradients."""

from __future__ import annotations

import math
import time
from fnmatch import fnmatchcase
from typing import Any, Callable, ClassVar, Mapping, Sequence

import torch

from ipufit._arguments import (
    check_choice,
    check_flags,
    check_function,
    refuse,
)
from ipufit._kinds import Kind, count, dict_of, number
from ipufit._plots import Axes, Figure, axes_for, label_rows
from ipufit.errors import (
    ConfigError,
    NonFiniteGradientWarning,
    UnknownNameError,
    warn,
)
from ipufit.types import Verbose

from .base import Callback, say

_MOST_COLUMNS = 1024  # of a heat map, an even number

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

    At the end of every epoch the callback adds two values to the logs, for later
    callbacks and History:

    - `samples_per_second`: real samples (no padding) divided by the seconds from the
      beginning of the epoch to its last call. Loading data and the callbacks between
      calls count; building programs and validation don't.
    - `latency_ms`: mean milliseconds from a call's data being ready to its results
      being ready.

    The callback also prints a line, `throughput: 1234.5 samples/sec`, which existing
    `benchmarks.yml` files find by their regular expressions.

    With several processes the samples of all are counted. Process 0 measures times and
    prints.

    Args:
        verbose: 1 prints the line after every epoch; 0 doesn't; "auto" prints it unless
            `fit` has `verbose=0`.
        clock: Returns the time in seconds, from any origin.

    Raises:
        ConfigError: `verbose` has another value.

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
    hears_every = None  # measuring doesn't change the length of calls
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
        check_choice("verbose", verbose, (0, 1, "auto"), of="Throughput")
        check_function("clock", clock, of="Throughput")
        self.verbose = verbose
        self._clock = clock
        self._since: float | None = None
        self._call_began = 0.0
        self._samples_before = 0
        self.epoch_seconds = 0.0
        self.epoch_samples = 0
        self.latencies_ms: dict[str, float] = {}
        self.calls: dict[str, int] = {}

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


class GradientMonitor(Callback):
    """Log the norms of the gradients in the updates.

    Gradients leave the device through PopTorch's anchors (`Options.anchorTensor`). The
    training program is built again with them, and every call sends them to the host.
    If that is too much, name the parameters that matter.

    A gradient is the mean over the updates of one call, without loss scaling and before
    clipping. With `device_iterations=1` a call is one update. With more updates,
    gradients of different signs cancel out. If your own options return only some
    micro-batches, the gradient is the mean over these micro-batches. An update that has
    only padding counts with gradients of zero.

    The callback adds to the logs, for later callbacks and History:

    - after every call `grad_norm`, the L2 norm of all gradients together;
    - after every epoch `grad_norm`, the mean over its calls, and `grad_norm_max`;
    - with `is_detailed`, `grad_norm/<parameter>` for each parameter too.

    `plot` draws the norm of each parameter in each update. The first gradient that
    isn't finite causes a warning with its parameter's name.

    Args:
        parameters: Names of trainable parameters, or patterns such as
            `"encoder.*.weight"`; all of them by default.
        is_detailed: If True, log a norm for each parameter too.

    Attributes:
        norms: Norms of the last call by name of the parameter.

    Raises:
        ConfigError: `parameters` must be names or patterns.
        UnknownNameError: When `fit` begins, if a name or pattern matches no trainable
            parameter.
        UnsupportedError: If the loss scaling is automatic: only the device knows the
            factor of the gradients.

    Example:
        >>> from ipufit import IPUModel
        >>> model = IPUModel(torch.nn.Linear(1, 1, bias=False))
        >>> model.compile("sgd", "mse")
        >>> model.set_weights([[[2.0]]])
        >>> x = torch.ones(4, 1)
        >>> history = model.fit(x, x, 4, verbose=0, callbacks=GradientMonitor())
        >>> history.history["grad_norm"]  # 2 * (w * x - y) * x
        [2.0]
    """

    saved_attributes: ClassVar[Mapping[str, Kind]] = {
        "sums": dict_of(number),
        "largest": number,
        "calls": count,
    }

    def __init__(
        self,
        parameters: str | Sequence[str] | None = None,
        *,
        is_detailed: bool = False,
    ) -> None:
        names = [parameters] if isinstance(parameters, str) else parameters
        is_listed = isinstance(names, (list, tuple, set, type(None)))
        if not is_listed or not all(isinstance(name, str) for name in names or ()):
            names_or_patterns = "names of parameters, or patterns such as 'encoder.*'"
            refuse("parameters", parameters, names_or_patterns, "GradientMonitor")
        check_flags("GradientMonitor", is_detailed=is_detailed)
        self.parameters = None if names is None else tuple(names)
        self.is_detailed = is_detailed
        self.norms: dict[str, float] = {}
        self.sums: dict[str, float] = {}
        self.largest = 0.0
        self.calls = 0
        self._names: tuple[str, ...] = ()
        self._has_warned = False
        self._clear_plot()

    def watched_gradients(self, module: torch.nn.Module) -> Sequence[str]:
        """Return the parameters that match the patterns, in the module's order."""
        names = [n for n, p in module.named_parameters() if p.requires_grad]
        patterns = ["*"] if self.parameters is None else self.parameters
        wanted: set[str] = set()
        for pattern in patterns:
            matching = {name for name in names if fnmatchcase(name, pattern)}
            if not matching and self.parameters is not None:
                raise UnknownNameError("trainable parameter", pattern, names)
            wanted |= matching
        self._names = tuple(name for name in names if name in wanted)
        return self._names

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Reset the values of an earlier run."""
        self._has_warned = False
        self._reset()
        self._clear_plot()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Reset the means of the epoch."""
        self._reset()

    def _reset(self) -> None:
        self.sums, self.largest, self.calls = {}, 0.0, 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Add the norms of the call to its logs."""
        gradients = self.model.gradients()
        self.norms = {
            name: float(torch.linalg.vector_norm(gradients[name]))
            for name in self._names
        }
        self._warn_of_non_finite(batch)
        self._add_column()
        figures = {"grad_norm": math.sqrt(sum(n * n for n in self.norms.values()))}
        if self.is_detailed:
            figures.update({f"grad_norm/{n}": v for n, v in self.norms.items()})
        logs.update(figures)
        self.calls += 1
        self.sums = {n: self.sums.get(n, 0.0) + v for n, v in figures.items()}
        norm = figures["grad_norm"]
        if math.isnan(norm) or norm > self.largest:  # NaN stays
            self.largest = norm

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Add the means of the epoch to its logs."""
        if self.calls:
            logs.update({name: total / self.calls for name, total in self.sums.items()})
            logs["grad_norm_max"] = self.largest

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """Draw the norms of the last `fit` as a heat map: a row for each parameter.

        Columns are updates, in the order of time. After more than 1024 calls a column
        has the largest norms of 2, 4, 8 ... calls. Norms that are 0 or not finite are
        left white. A resumed `fit` draws what came after the resumption.

        Args:
            axes: matplotlib's axes to draw in; by default new ones in a new figure of
                pyplot.

        Returns:
            The matplotlib figure that has the axes.

        Raises:
            ConfigError: matplotlib isn't installed, or there was no update yet.
        """
        if not self._columns:
            raise ConfigError(
                "There is nothing to draw: GradientMonitor saw no update. Call plot() "
                "after fit()."
            )
        height = 1.5 + 0.2 * min(len(self._names), 40)
        [part, *_] = axes_for(1, axes, "GradientMonitor.plot()", (8.0, height))
        norms = torch.stack(self._columns, dim=1)
        has_color = norms.gt(0) & norms.isfinite()
        image = part.imshow(
            norms.masked_fill(~has_color, math.nan).numpy(),
            norm="log" if has_color.any() else None,
            aspect="auto",
            interpolation="nearest",
            extent=(
                self._first_update - 0.5,
                self._last_update + 0.5,
                len(self._names) - 0.5,
                -0.5,
            ),
        )
        label_rows(part.yaxis, self._names)
        part.set_xlabel("update")
        part.figure.colorbar(image, ax=part, label="norm of the gradient")
        return part.figure

    def _clear_plot(self) -> None:
        self._columns: list[torch.Tensor] = []  # norms by parameter
        self._calls_per_column, self._num_calls = 1, 0

    def _add_column(self) -> None:
        """Add the norms of the call to the columns of the heat map."""
        norms = torch.tensor(list(self.norms.values()))
        self._last_update = self.run.updates
        if not self._columns:
            self._first_update = self._last_update
        if self._num_calls % self._calls_per_column:
            self._columns[-1] = torch.maximum(self._columns[-1], norms)
        else:
            self._columns.append(norms)
        self._num_calls += 1
        if len(self._columns) > _MOST_COLUMNS:
            pairs = zip(self._columns[::2], self._columns[1::2] + self._columns[-1:])
            self._columns = [torch.maximum(*pair) for pair in pairs]
            self._calls_per_column *= 2

    def _warn_of_non_finite(self, batch: int) -> None:
        odd = [name for name, norm in self.norms.items() if not math.isfinite(norm)]
        if not odd or self._has_warned:
            return
        self._has_warned = True
        warn(
            f"The gradient of {odd[0]}{f' and {len(odd) - 1} more' if odd[1:] else ''} "
            f"is {self.norms[odd[0]]} in epoch {self.run.epoch + 1}, at update {batch} "
            "or one of its call. Lower the learning rate, clip (Optimizer(..., "
            "global_clipnorm=1.0)), or look at the loss scaling in half precision.",
            NonFiniteGradientWarning,
        )
