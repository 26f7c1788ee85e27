# SPDX-License-Identifier: Apache-2.0
"""Displays of a run: rich bars, plain lines, or nothing."""

from __future__ import annotations

import math
import time
from importlib.util import find_spec
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Callable, Iterable

from ipufit.errors import ConfigError
from ipufit.types import Verbose

from .base import Callback

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress

Clock = Callable[[], float]
_SECONDS_BETWEEN = 0.1


class ProgressDisplay(Callback):
    """Base of displays: counts samples, steps and seconds, and prints nothing.

    rich, which is slow to import, is imported when something is shown.

    Args:
        console: Console to write to; None for standard output.
        clock: Returns the time in seconds, from any origin.
    """

    is_saved = False
    writes_for_all = True

    def __init__(
        self, console: Console | None = None, clock: Clock = time.perf_counter
    ) -> None:
        self._given_console = console
        self._clock = clock
        self._is_fit = False
        self._start_seconds = 0.0
        self._samples_before = 0
        self._steps_done = 0

    @property
    def _console(self) -> Console:
        if self._given_console is None:
            self._given_console = _standard_output()
        return self._given_console

    @property
    def is_due(self) -> bool:
        """Whether the display shows metrics after the present call."""
        return False

    def compiling(self, what: str) -> None:
        """Called before a program is compiled."""

    def compiled(self, what: str, seconds: float, remark: str = "") -> None:
        """Called after a program was compiled; `remark` names automatic choices."""

    def noted(self, line: str) -> None:
        """Called with a line about an automatic choice."""

    def close(self) -> None:
        """Restore the terminal, also after an error."""
        self._is_fit = False

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Show epochs, without a bar for validations, as in Keras."""
        self._is_fit = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Start the clock."""
        self._start_clock()
        self._begin(f"Epoch {epoch + 1}/{self.params['epochs']}")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Show the updates of the call, and the metrics so far."""
        self._advance(batch + 1, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Show the metrics of the epoch."""
        self._end(logs)

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """Start the clock of an `evaluate`."""
        if not self._is_fit:
            self._start_clock()
            self._begin("Evaluating")

    def on_test_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Show the steps of an `evaluate`, and the metrics so far."""
        if not self._is_fit:
            self._advance(batch + 1, logs)

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """Show the metrics of an `evaluate`; a validation's are shown by the epoch."""
        if not self._is_fit:
            self._end(logs)

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        """Start the clock."""
        self._start_clock()
        self._begin("Predicting")

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Show the steps of the call."""
        self._advance(batch + 1, None)

    def on_predict_end(self, logs: dict[str, Any]) -> None:
        """Show the time that the prediction took."""
        self._end({})

    def _begin(self, title: str) -> None:
        """Show that an epoch, an evaluation or a prediction begins."""

    def _advance(self, steps: int, logs: dict[str, Any] | None) -> None:
        """Count a call, and show its metrics; None if there are none."""
        self._steps_done = steps

    def _end(self, logs: dict[str, Any]) -> None:
        """Show the last metrics."""

    def _start_clock(self) -> None:
        self._start_seconds = self._clock()
        self._samples_before = self.run.samples
        self._steps_done = 0

    def _seconds(self) -> float:
        return self._clock() - self._start_seconds

    def _coverage(self) -> str:
        """Describe the samples that the metrics cover; "" if they cover all."""
        return f" ({self.run.coverage})" if self.run.coverage else ""


class LineProgress(ProgressDisplay):
    """Display of `verbose=2`: a line per compilation, and Keras's lines."""

    def compiled(self, what: str, seconds: float, remark: str = "") -> None:
        """Print the time that compilation took, and the remark."""
        ending = f": {remark}" if remark else ""
        self._print(f"Compiled the {what} program in {seconds:.1f}s{ending}")

    def noted(self, line: str) -> None:
        """Print the line."""
        self._print(line)

    def _begin(self, title: str) -> None:
        if self._is_fit and self.params["epochs"] > 1:
            self._print(title)

    def _end(self, logs: dict[str, Any]) -> None:
        done = self._steps_done
        if not done:  # as in Keras
            return
        planned = self.params.get("steps", self.params.get("calls")) or done
        seconds = self._seconds()
        figures = f" - {format_logs(logs)}" if logs else ""
        self._print(
            f"{done:{len(str(planned))}}/{planned} - {seconds:.0f}s - "
            f"{format_duration(seconds / done)}/step{figures}{self._coverage()}"
        )

    def _print(self, line: str) -> None:
        """Print a line; on a terminal, break it between metrics."""
        console, width = self._console, self._console.width
        if console.is_dumb_terminal:  # rich assumes 80 columns
            width = get_terminal_size((width, 0)).columns
        is_wrapped = console.is_terminal and len(line) > width
        text = in_lines(line, width) if is_wrapped else line
        console.print(
            text,
            highlight=False,
            markup=False,
            soft_wrap=not is_wrapped,
            width=width if is_wrapped else None,
        )


class BarProgress(LineProgress):
    """Display of `verbose=1`: compilations, and a bar per epoch.

    Where a bar can't be redrawn, it shows the lines of `verbose=2`.
    """

    _bar: Progress | None = None
    _task: Any = 0
    _shown_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the metrics on the screen are old enough to be replaced."""
        is_on = self._bar is not None
        return is_on and self._clock() - self._shown_at >= _SECONDS_BETWEEN

    def compiling(self, what: str) -> None:
        """Print that a program is being compiled."""
        if can_redraw(self._console):
            self._console.print(f"Compiling the {what} program ...", style="dim")

    def close(self) -> None:
        """Restore the terminal, also after an error."""
        super().close()
        self._stop()

    def _begin(self, title: str) -> None:
        """Start a bar."""
        if not can_redraw(self._console):
            super()._begin(title)
            return
        total = self.params.get("steps")  # None for a stream of unknown length
        self._bar = _bar_with_figures(self._console, self._clock, title, total)
        self._bar.start()
        self._task = self._bar.add_task(title, total=total, figures="")
        self._steps_done = self._steps_before() if self._is_fit else 0
        self._shown_at = -math.inf

    def _advance(self, steps: int, logs: dict[str, Any] | None) -> None:
        """Count a call; the screen changes at most ten times a second."""
        super()._advance(steps, logs)
        if self._bar is not None and self.is_due and (logs or logs is None):
            self._shown_at = self._clock()
            figures = self._figures(logs or {})
            self._bar.update(self._task, completed=self._steps_done, figures=figures)

    def _end(self, logs: dict[str, Any]) -> None:
        """Leave the bar on the screen, with the last metrics."""
        if self._bar is None:
            super()._end(logs)
            return
        total = self._bar.tasks[0].total
        self._bar.update(
            self._task,
            completed=self._steps_done,
            total=self._steps_done if total is None else total,
            figures=self._figures(logs) + (self._coverage() if logs else ""),
        )
        self._stop()

    def _steps_before(self) -> int:
        """Return the updates of this epoch that an interrupted run made."""
        steps, calls = self.params.get("steps"), self.params.get("calls")
        return self.run.calls * (steps // calls if steps and calls else 1)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _figures(self, logs: dict[str, Any]) -> str:
        """Format the metrics; in training, samples per second come first."""
        if not self._is_fit:
            return format_logs(logs)
        samples = self.run.samples - self._samples_before
        rate = f"{samples / max(self._seconds(), 1e-9):.0f} samples/s"
        return f"{rate} - {format_logs(logs)}"


def make_progress(
    verbose: Verbose,
    console: Console | None = None,
    clock: Clock = time.perf_counter,
) -> ProgressDisplay:
    """Return the display that `verbose` chooses.

    Args:
        verbose: 0 for none, 2 for lines, 1 for bars, or lines where bars can't be
            redrawn; `"auto"` is 1 on a terminal, else 2.
        console: Console to write to; standard output by default.
        clock: Returns the time in seconds, from any origin.

    Raises:
        ConfigError: If `verbose` has another value.

    Example:
        >>> type(make_progress(2)).__name__
        'LineProgress'
    """
    if verbose == "auto":
        console = console or _standard_output()
        verbose = 1 if console.is_terminal else 2
    displays = {0: ProgressDisplay, 1: BarProgress, 2: LineProgress}
    if not isinstance(verbose, int) or verbose not in displays:
        raise ConfigError(f"verbose={verbose!r} is none of 0, 1, 2 and 'auto'.")
    return displays[verbose](console, clock)


def can_redraw(console: Console) -> bool:
    """Return whether a bar can be redrawn on a console.

    It can't in a pipe, in a file, on a dumb terminal, and in a notebook without the
    widgets that rich needs.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> can_redraw(Console(file=io.StringIO(), force_jupyter=False))
        False
    """
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal


def _standard_output() -> Console:
    from rich.console import Console

    console = Console()
    if console.is_jupyter and not can_redraw(console):
        # Else each line would be a page of HTML. Kernels ask for a terminal's colours.
        return Console(force_jupyter=False, force_terminal=False)
    return console


class ProgressBar(BarProgress):
    """Show the bars of `verbose=1`, or lines where no bar can be redrawn.

    It replaces the display that `verbose` chooses, and shows values that earlier
    callbacks add to the logs.

    Args:
        console: Console to write to; standard output by default.
        clock: Returns the time in seconds, from any origin.

    Example:
        >>> import sys
        >>> from rich.console import Console
        >>> bar = ProgressBar(Console(file=sys.stderr))
    """


def in_lines(figures: str, width: int) -> str:
    """Break a line of metrics at `width`, between metrics where possible.

    Example:
        >>> print(in_lines("2/2 - accuracy: 0.9877 - loss: 0.2500", 24))
        2/2 - accuracy: 0.9877
        loss: 0.2500
    """
    first, *others = figures.split(" - ")
    lines = [first]
    for figure in others:
        longer = f"{lines[-1]} - {figure}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(figure)
    return "\n".join(lines)


def format_duration(seconds: float) -> str:
    """Format a duration as Keras does: in whole s, ms or us.

    Example:
        >>> format_duration(2.4), format_duration(0.0024), format_duration(2.4e-6)
        ('2s', '2ms', '2us')
    """
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.0f}s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.0f}ms"
    return f"{seconds * 1e6:.0f}us"


def format_logs(logs: dict[str, Any]) -> str:
    """Format metrics as Keras does: four decimals, or an exponent if they are small.

    Example:
        >>> format_logs({"accuracy": 0.98765, "loss": -0.00012})
        'accuracy: 0.9877 - loss: -1.2000e-04'
    """
    return " - ".join(
        f"{name}: {value:.4f}" if abs(value) > 1e-3 else f"{name}: {value:.4e}"
        for name, value in logs.items()
    )


def _bar_with_figures(
    console: Console, clock: Clock, title: str, total: int | None
) -> Progress:
    """Return a bar, not started yet, that fits its numbers on one line.

    Metrics are beside it, or below it if the terminal is too narrow.

    Args:
        console: Console to write to.
        clock: Returns the time in seconds, from any origin.
        title: Text in front of the bar, such as "Epoch 1/3".
        total: Number of updates or batches to come; None if unknown.
    """
    from rich import progress
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    class FiguresBar(progress.Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            """Yield the bar and its metrics for rich to draw."""
            bar = self.make_tasks_table(self.tasks)
            figures = self.tasks[0].fields["figures"] if self.tasks else ""
            taken = Measurement.get(console, console.options, bar).maximum
            if figures and taken + 1 + len(figures) <= console.width:
                row = Table.grid(padding=(0, 1))
                row.add_row(bar, Text(figures))
                yield row
            else:
                yield bar
                if figures:
                    yield Text(in_lines(figures, console.width))

    counts = 2 * len(str(total or 9999)) + 1
    room = console.width - len(title) - counts - len("0:00:00") - 3
    columns: list[progress.ProgressColumn] = [
        progress.TextColumn("{task.description}"),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    ]
    if room >= 4:
        columns.insert(1, progress.BarColumn(bar_width=min(20, room)))
    return FiguresBar(*columns, console=console, get_time=clock, refresh_per_second=10)
