# SPDX-License-Identifier: Apache-2.0
"""What a run shows: rich bars, plain lines, or nothing."""

from __future__ import annotations

import time
from typing import Any, Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

from ipufit.errors import ConfigError
from ipufit.types import Verbose

from .base import Callback

Clock = Callable[[], float]


class ProgressDisplay(Callback):
    """Base of displays: counts samples and seconds; shows nothing.

    Args:
        console: Where to.
        clock: Seconds, for rates.
    """

    def __init__(self, console: Console, clock: Clock = time.perf_counter) -> None:
        self._console = console
        self._clock = clock
        self._epoch_start = 0.0
        self._samples_before = 0

    def compiling(self, what: str) -> None:
        """A program is about to be compiled."""

    def compiled(self, what: str, seconds: float) -> None:
        """It was."""

    def close(self) -> None:
        """Leave the terminal as it was, after an error too."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Start the clock."""
        self._epoch_start = self._clock()
        self._samples_before = self.run.samples

    def _coverage(self) -> str:
        """Which samples the figures are about, if not about all."""
        return f" ({self.run.coverage})" if self.run.coverage else ""

    def _rate(self) -> float:
        """Samples per second of the epoch so far."""
        seconds = max(self._clock() - self._epoch_start, 1e-9)
        return (self.run.samples - self._samples_before) / seconds


class LineProgress(ProgressDisplay):
    """`verbose=2`: a line per compilation and per epoch, for files and CI."""

    def compiled(self, what: str, seconds: float) -> None:
        """Say how long it took."""
        self._print(f"Compiled the {what} program in {seconds:.1f}s")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """The epoch's figures."""
        seconds = self._clock() - self._epoch_start
        self._print(
            f"Epoch {epoch + 1}/{self.params['epochs']} - {seconds:.1f}s - "
            f"{self._rate():.0f} samples/s - {format_logs(logs)}{self._coverage()}"
        )

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """The figures of an `evaluate` of its own; `fit` reports them itself."""
        if "epochs" not in self.params:
            self._print(f"Evaluated - {format_logs(logs)}{self._coverage()}")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class BarProgress(ProgressDisplay):
    """`verbose=1`: the compile phases, then a bar per epoch."""

    _bar: Progress | None = None
    _task = TaskID(0)

    def compiling(self, what: str) -> None:
        """Show that compilation takes its time."""
        self._console.print(f"Compiling the {what} program ...", style="dim")

    def compiled(self, what: str, seconds: float) -> None:
        """Say how long it took."""
        self._console.print(f"Compiled the {what} program in {seconds:.1f}s")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """A new bar."""
        super().on_epoch_begin(epoch, logs)
        self._start(f"Epoch {epoch + 1}/{self.params['epochs']}", self.params["calls"])

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """One call further; rich redraws ten times a second at most."""
        self._advance(f"{self._rate():.0f} samples/s - {format_logs(logs)}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """The bar stays with the epoch's figures."""
        self._finish(
            f"{self._rate():.0f} samples/s - {format_logs(logs)}{self._coverage()}"
        )

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """A bar for an `evaluate` of its own; a validation has none, as in Keras."""
        if "epochs" not in self.params:
            self._start("Evaluating", self.params["calls"])

    def on_test_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """One call further."""
        if "epochs" not in self.params:
            self._advance(format_logs(logs))

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """The bar stays with the figures."""
        if "epochs" not in self.params:
            self._finish(f"{format_logs(logs)}{self._coverage()}")

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        """A bar."""
        self._start("Predicting", self.params["calls"])

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """One call further."""
        self._advance("")

    def on_predict_end(self, logs: dict[str, Any]) -> None:
        """Done."""
        self._finish()

    def close(self) -> None:
        """Leave the terminal as it was, after an error too."""
        self._finish()

    def _start(self, title: str, total: int) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            # The only one to wrap if the terminal is narrow.
            TextColumn("{task.fields[figures]}", table_column=Column(overflow="fold")),
            console=self._console,
            get_time=self._clock,
            refresh_per_second=10,
        )
        self._bar.start()
        self._task = self._bar.add_task(title, total=total, figures="")

    def _advance(self, figures: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=1, figures=figures)

    def _finish(self, figures: str | None = None) -> None:
        if self._bar is None:
            return
        if figures is not None:
            self._bar.update(self._task, figures=figures)
        self._bar.stop()
        self._bar = None


def make_progress(
    verbose: Verbose,
    console: Console | None = None,
    clock: Clock = time.perf_counter,
) -> ProgressDisplay:
    """The display that `verbose` asks for.

    Args:
        verbose: 0 nothing, 1 bars, 2 lines; `"auto"` bars on a terminal, else lines.
        console: Where to; standard output by default.
        clock: Seconds.

    Returns:
        The display, a callback.

    Raises:
        ConfigError: `verbose` is something else.

    Example:
        >>> type(make_progress(2)).__name__
        'LineProgress'
    """
    console = console or Console()
    if verbose == "auto":
        verbose = 1 if console.is_terminal else 2
    displays = {0: ProgressDisplay, 1: BarProgress, 2: LineProgress}
    if not isinstance(verbose, int) or verbose not in displays:
        raise ConfigError(f"verbose={verbose!r} is none of 0, 1, 2 and 'auto'.")
    return displays[verbose](console, clock)


def format_logs(logs: dict[str, Any]) -> str:
    """Figures in Keras's form: four decimals, or an exponent for small ones.

    Example:
        >>> format_logs({"accuracy": 0.98765, "loss": -0.00012})
        'accuracy: 0.9877 - loss: -1.2000e-04'
    """
    return " - ".join(
        f"{name}: {value:.4f}" if abs(value) > 1e-3 else f"{name}: {value:.4e}"
        for name, value in logs.items()
    )
