# SPDX-License-Identifier: Apache-2.0
"""Displays of a run: rich bars, plain lines, or nothing."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import threading
import time
from datetime import timedelta
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Iterator

from ipufit._arguments import check_choice, check_function, refuse
from ipufit._env import is_first_process
from ipufit._lazy import need
from ipufit.errors import ConfigError, IpufitWarning, warn
from ipufit.types import Verbose

from .base import Callback, numbers_in

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

Clock = Callable[[], float]
_SECONDS_BETWEEN = 0.1
_QUICK_SECONDS = 1.0
"""Seconds from which a compilation is announced, and a prediction has a line."""


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
        check_function("clock", clock, of=type(self).__name__)
        if console is not None and not hasattr(console, "print"):
            refuse("console", console, "a rich.console.Console", type(self).__name__)
        self._chosen_console = console
        self._clock = clock
        self._is_fit = False
        self._start_seconds = 0.0
        self._samples_before = 0
        self._steps_done = 0
        self._compile_seconds = 0.0

    @cached_property
    def _console(self) -> Console:
        return self._chosen_console or _standard_output()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the console, which is that of this process."""
        return {n: v for n, v in super().__getstate__().items() if n != "_console"}

    @property
    def is_due(self) -> bool:
        """Whether the display shows metrics after the present call."""
        return False

    @property
    def shows_poptorch_bar(self) -> bool:
        """Whether PopTorch may draw its bar while it compiles."""
        return False

    @contextlib.contextmanager
    def compiling(self, program: str) -> Iterator[None]:
        """Announce the compilation of a program, unless it is fast.

        A thread prints the line, because a compilation blocks this thread. PopTorch
        releases Python's lock meanwhile (`compileWithManualTracing`).
        """
        line = f"Compiling the {program} program, which takes minutes on IPUs"
        timer = threading.Timer(_QUICK_SECONDS, self.noted, [line])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def compiled(self, what: str, seconds: float) -> None:
        """Called after a program was compiled."""
        self._compile_seconds += seconds

    def noted(self, line: str) -> None:
        """Called with a line about an automatic choice."""

    def close(self) -> None:
        """Restore the terminal, also after an error."""
        self._is_fit = False

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Show epochs, without a bar for validations, as in Keras."""
        self._is_fit = True

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Say after Ctrl-C what is kept, below the bar."""
        run = self.run
        if run.stop_reason == "interrupted":
            self.close()
            saved = ""
            for use, (path, update) in run.saved.items():
                short = min(str(path), os.path.relpath(path), key=len)
                saved += f" {short} has update {update}: {use}."
            self.noted(
                f"Interrupted after update {run.updates}. The module has its weights"
                f"{f'.{saved}' if saved else ', and fit goes on with them.'}"
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Start the clock."""
        epochs = self.params["epochs"]
        counted = f"{epoch + 1}/{epochs}"
        self._begin(f"Epoch {counted}", counted.rjust(2 * len(str(epochs)) + 1))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Show the updates of the call, and the metrics so far."""
        self._advance(batch + 1, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Show the metrics of the epoch."""
        self._finish(logs)

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """Start the clock of an `evaluate`."""
        if not self._is_fit:
            self._begin("Evaluating", "Evaluated")

    def on_test_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Show the steps of an `evaluate`, and the metrics so far."""
        if not self._is_fit:
            self._advance(batch + 1, logs)

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """Show the metrics of an `evaluate`; the epoch shows those of a validation."""
        if not self._is_fit:
            self._finish(logs)

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        """Start the clock."""
        self._begin("Predicting", "Predicted")

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Show the steps of the call."""
        self._advance(batch + 1, None)

    def on_predict_end(self, logs: dict[str, Any]) -> None:
        """Show the time that the prediction took."""
        self._finish({})

    def _begin(self, title: str, end_title: str) -> None:
        """Start the clock, and show that an epoch, evaluation or prediction begins.

        Args:
            title: Title of the epoch, evaluation or prediction, such as "Epoch 1/3".
            end_title: Title of the last line.
        """
        self._start_seconds = self._clock()
        self._samples_before = self.run.samples
        self._steps_done = 0

    def _advance(self, steps: int, logs: dict[str, Any] | None) -> None:
        """Count a call, and show its metrics; None without metrics."""
        self._steps_done = steps

    def _finish(self, logs: dict[str, Any]) -> None:
        """Show the last metrics, unless there were no steps, as in Keras."""
        if self._steps_done:
            self._end(logs)

    def _end(self, logs: dict[str, Any]) -> None:
        """Show the last metrics."""

    def _seconds(self) -> float:
        return self._clock() - self._start_seconds

    def _coverage(self) -> str:
        """Describe the samples that the metrics cover; "" if they cover all."""
        return f" ({self.run.coverage})" if self.run.coverage else ""


class Notes(ProgressDisplay):
    """Display of methods without `verbose`: prints choices on standard error."""

    def noted(self, line: str) -> None:
        """Print the line, once for all processes."""
        if is_first_process():
            sys.stderr.write(f"ipufit: {line}\n")


class _Printing(ProgressDisplay):
    """Base of displays that print; all compilations before a run have one line."""

    @property
    def shows_poptorch_bar(self) -> bool:
        """Whether standard error is a terminal on which rich draws no bar now."""
        stderr = sys.stderr
        is_terminal = stderr is not None and stderr.isatty()
        is_free = stderr is sys.__stderr__  # rich replaces it below its bar
        return is_terminal and is_free and can_redraw(self._console)

    @contextlib.contextmanager
    def compiling(self, program: str) -> Iterator[None]:
        """Announce the compilation of a program, unless it is fast."""
        # rich draws from Python's random generator when it is imported. In the thread
        # this would be taken for a draw in `forward`.
        import_module("rich.console")
        with super().compiling(program):
            yield

    def noted(self, line: str) -> None:
        """Print the line above PopTorch's bar."""
        from rich.control import Control
        from rich.segment import ControlType

        with self._console:  # in a single write
            if self.shows_poptorch_bar:
                erase = ControlType.ERASE_IN_LINE, 2
                self._console.control(Control(ControlType.CARRIAGE_RETURN, erase))
            self._print(line)

    def _begin(self, title: str, end_title: str) -> None:
        super()._begin(title, end_title)
        if self._compile_seconds >= _QUICK_SECONDS:
            self._print(f"Compiled in {self._compile_seconds:.1f} s")
        self._compile_seconds = 0.0

    def _print(self, line: str) -> None:
        """Print a line; on a terminal, break it between metrics."""
        console, width = self._console, self._console.width
        if console.is_dumb_terminal:  # rich assumes 80 columns
            width = get_terminal_size((width, 0)).columns
        is_wrapped = console.is_terminal and len(line) > width
        console.print(
            in_lines(line, width) if is_wrapped else line,
            highlight=False,
            markup=False,
            soft_wrap=not is_wrapped,
            width=width if is_wrapped else None,
        )


class LineProgress(_Printing):
    """Display of `verbose=2`: Keras's lines, after a line for compilations."""

    def _begin(self, title: str, end_title: str) -> None:
        super()._begin(title, end_title)
        if self._is_fit and self.params["epochs"] > 1:
            self._print(title)

    def _end(self, logs: dict[str, Any]) -> None:
        done = self._steps_done
        planned = self.params.get("steps", self.params.get("calls")) or done
        seconds = self._seconds()
        figures = f" - {format_logs(logs)}" if logs else ""
        self._print(
            f"{done:{len(str(planned))}}/{planned} - {seconds:.0f}s - "
            f"{format_duration(seconds / done)}/step{figures}{self._coverage()}"
        )


class ProgressBar(_Printing):
    """Show the bars of `verbose=1`, and a line per epoch.

    The bar shows the updates or batches so far, the time so far, the time to come of
    the epoch (ETA) and of all epochs, samples per second, the learning rate and the
    metrics. Where no bar can be redrawn, only the lines are printed. A prediction of
    less than a second leaves no line. In a notebook with matplotlib, a fit of several
    epochs also draws the loss.

    Passed as a callback, it replaces the display that `verbose` chooses, and shows
    values that earlier callbacks add to the logs.

    Args:
        console: Console to write to; standard output by default.
        clock: Returns the time in seconds, from any origin.

    Example:
        >>> import sys
        >>> from rich.console import Console
        >>> bar = ProgressBar(Console(file=sys.stderr))
    """

    _console_with_bar: ClassVar[Console | None] = None  # of this run or an outer run
    _live: Live | None = None
    _cell: Any = None  # the handle of an output in a notebook
    _title = _end_title = _figures = ""
    _shown_at = _drawn_at = 0.0
    _curve: Any = None  # the handle of the loss's picture in a notebook
    _make_figure: Any = None
    _widths: dict[str, int] | None = None
    _epochs_left = 0
    _epoch_seconds = 0.0  # of the last epoch, with its validation; 0 before it
    _first_call: tuple[float, int] | None = None  # seconds and steps at its end

    @property
    def is_due(self) -> bool:
        """Whether the metrics on the screen are old enough to be replaced."""
        is_on = self._live is not None or self._cell is not None
        return is_on and self._clock() - self._shown_at >= _SECONDS_BETWEEN

    def close(self) -> None:
        """Restore the terminal; after an error the bar stays visible."""
        super().close()
        self._cell = self._curve = None
        if self._live is not None:
            self._live.transient = False
        self._stop()

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Forget an earlier run, and begin a picture of the loss in a notebook."""
        super().on_train_begin(logs)
        self._epochs_left, self._epoch_seconds, self._widths = 0, 0.0, {}
        if self.params["epochs"] > 1 and _is_in_notebook(self._console):
            with self._drawing(), contextlib.suppress(ConfigError):  # not installed
                module = need("matplotlib.figure", "A plot", "ipufit[plot]")
                self._make_figure = module.Figure
                display = import_module("IPython.display").display
                self._curve = display({"text/plain": ""}, raw=True, display_id=True)
                self._drawn_at = self._clock()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Start the clock, and a bar."""
        if self._epochs_left:  # else the run begins
            self._epoch_seconds = self._seconds()
        self._epochs_left = self.params["epochs"] - epoch
        super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Show the metrics of the epoch; the loss is drawn once a second."""
        super().on_epoch_end(epoch, logs)
        if self._clock() - self._drawn_at >= 1:
            self._draw()

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Draw the loss of all epochs, also after Ctrl-C."""
        self._draw()
        super().on_train_end(logs)

    def _draw(self) -> None:
        """Replace the picture of the loss by one that the notebook's file keeps."""
        if self._curve is None or "loss" not in self.model.history.history:
            return
        with self._drawing():
            figure = self._make_figure(figsize=(6, 2.5), layout="constrained")
            self.model.history.plot("loss", axes=figure.add_subplot())
            file = io.BytesIO()
            figure.savefig(file, format="png")
            image = import_module("IPython.display").Image
            self._curve.update(image(file.getvalue()))
        self._drawn_at = self._clock()

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """After an error of matplotlib, warn and draw nothing more in this run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the run is worth more
            self._curve = None
            warn(f"The curve of the loss can't be drawn: {error!r}", IpufitWarning)

    def _begin(self, title: str, end_title: str) -> None:
        """Start a bar."""
        super()._begin(title, end_title)
        self._title, self._end_title = title, end_title
        self._figures, self._shown_at = "", -math.inf
        self._first_call, console = None, self._console
        if _is_in_notebook(console):
            display = import_module("IPython.display").display
            self._cell = display({"text/plain": title}, raw=True, display_id=True)
        elif can_redraw(console) and ProgressBar._console_with_bar is None:
            from rich.live import Live

            ProgressBar._console_with_bar = console
            self._live = Live(get_renderable=self._bar, console=console, transient=True)
            self._live.start()

    def _advance(self, steps: int, logs: dict[str, Any] | None) -> None:
        """Count a call; the metrics change at most ten times a second."""
        super()._advance(steps, logs)
        self._first_call = self._first_call or (self._seconds(), steps)
        if self.is_due and (logs or logs is None):
            self._shown_at = self._clock()
            samples = self.run.samples - self._samples_before
            rate = samples / max(self._seconds(), 1e-9)
            speed = f"{rate:{'.3g' if rate < 100 else '.0f'}} samples/s"
            figures = format_logs(logs or {}, "  ", " ")
            if self._is_fit:
                learning_rate = self.model.optimizer.param_groups[0]["lr"]
                figures = f"{speed}  lr {learning_rate:.4g}  {figures}"
            self._figures = figures
            if self._cell is not None:
                text = "".join(s.text for s in self._console.render(self._bar()))
                self._cell.update({"text/plain": text}, raw=True)

    def _finish(self, logs: dict[str, Any]) -> None:
        """Replace the bar by a line with the last metrics."""
        self._stop()
        super()._finish(logs)

    def _end(self, logs: dict[str, Any]) -> None:
        title, seconds = self._end_title, self._seconds()
        is_short = 1 <= seconds < 10
        time_taken = f"{seconds:.1f}s" if is_short else format_duration(seconds)
        line = f"{title} {time_taken:>5}" if self._is_fit else f"{title} {time_taken}"
        if logs:
            line += f"  {format_logs(logs, '  ', ' ', self._widths)}{self._coverage()}"
        elif seconds < _QUICK_SECONDS:
            line = ""
        if self._cell is not None:
            self._cell.update({"text/plain": line}, raw=True)
        elif line:
            self._print(line)
        self._cell = None

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = ProgressBar._console_with_bar = None

    def _bar(self) -> RenderableType:
        """Draw the bar, with the metrics beside it or, where it's narrow, below."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table
        from rich.text import Text

        done, seconds = self._steps_done, self._seconds()
        total = self.params.get("steps")  # None for a stream of unknown length
        times = _format_time(seconds)
        if total is not None and self._first_call is not None:
            first_seconds, first_steps = self._first_call
            if done > first_steps:
                per_step = (seconds - first_seconds) / (done - first_steps)
                to_come = per_step * max(total - done, 0)
                times += f" ETA {_format_time(to_come)}"
                if self._epochs_left > 1:
                    per_epoch = max(self._epoch_seconds, per_step * total)
                    to_come += per_epoch * (self._epochs_left - 1)
                    times += f", all {_format_time(to_come)}"
        counts = f"{done}/{'?' if total is None else total}"
        cells: list[RenderableType] = [Text(self._title)]
        cells += [Text(counts, "green"), Text(times, "yellow")]
        taken = len(self._title) + len(counts) + len(times) + 3
        width = min(20, self._console.width - taken)
        if width >= 4:
            cells.insert(1, Bar(total, min(done, total or done), width))
            taken += width + 1
        figures = Text(in_lines(self._figures, self._console.width))
        is_wide = taken + len(self._figures) <= self._console.width
        row = Table.grid(padding=(0, 1))
        row.add_row(*cells, *([figures] if is_wide else []))
        return Group(row) if is_wide else Group(row, figures)


def _format_time(seconds: float) -> str:
    """Format a duration as 01:02, from an hour on as 1:01:02."""
    return str(timedelta(seconds=int(seconds)))[2 if seconds < 3600 else 0 :]


def make_progress(
    verbose: Verbose,
    console: Console | None = None,
    clock: Clock = time.perf_counter,
) -> ProgressDisplay:
    """Return the display that `verbose` chooses.

    Args:
        verbose: 0 for none, 2 for Keras's lines, 1 or `"auto"` for bars, and a line
            per epoch.
        console: Console to write to; standard output by default.
        clock: Returns the time in seconds, from any origin.

    Raises:
        ConfigError: If `verbose` has another value.

    Example:
        >>> type(make_progress(2)).__name__
        'LineProgress'
    """
    check_choice("verbose", verbose, (0, 1, 2, "auto"))
    displays = {0: ProgressDisplay, 1: ProgressBar, "auto": ProgressBar}
    return displays.get(verbose, LineProgress)(console, clock)


def can_redraw(console: Console) -> bool:
    """Return whether a bar can be redrawn on a console.

    It can't in a pipe, in a file and on a dumb terminal. In a notebook an output of
    the cell is replaced instead.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> can_redraw(Console(file=io.StringIO(), force_jupyter=False))
        False
    """
    return console.is_terminal and not console.is_dumb_terminal


def _standard_output() -> Console:
    from rich.console import Console

    if ProgressBar._console_with_bar is not None:  # prints lines above its bar
        return ProgressBar._console_with_bar
    console = Console()
    if not console.is_jupyter:
        return console
    # Else each line would be a page of HTML, and kernels ask for a terminal's colors.
    return Console(force_jupyter=False, force_terminal=False, width=100)


def _is_in_notebook(console: Console) -> bool:
    """Return whether a console writes to the outputs of a notebook's cells."""
    from rich.console import Console

    is_standard = console.file is sys.stdout and find_spec("IPython") is not None
    return is_standard and Console().is_jupyter


def in_lines(line: str, width: int) -> str:
    """Break a line of metrics at `width`, between metrics where possible.

    Example:
        >>> print(in_lines("2/2 - accuracy: 0.9877 - loss: 0.2500", 24))
        2/2 - accuracy: 0.9877
        loss: 0.2500
        >>> print(in_lines("1/2 3s  accuracy 0.9877  loss 0.2500", 26))
        1/2 3s  accuracy 0.9877
        loss 0.2500
    """
    between = " - " if " - " in line else "  "
    first, *others = line.split(between)
    lines = [first]
    for figure in others:
        longer = f"{lines[-1]}{between}{figure}"
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


def format_logs(
    logs: dict[str, Any],
    between: str = " - ",
    of: str = ": ",
    widths: dict[str, int] | None = None,
) -> str:
    """Format metrics with four decimals; small and large ones with six digits.

    Args:
        logs: The metrics by name.
        between: Text between two metrics.
        of: Text between a name and its value.
        widths: Largest width of each metric's value so far, to which values are padded
            so that lines align. It is updated; None for no padding.

    Example:
        >>> format_logs({"accuracy": 0.98765, "loss": 0.000012, "mse": 12345.678})
        'accuracy: 0.9877 - loss: 1.2e-05 - mse: 12345.7'
    """
    figures = []
    for name, value in numbers_in(logs).items():
        is_usual = value == 0 or 1e-3 <= abs(value) < 100
        number = f"{value:.4f}" if is_usual else f"{value:.6g}"
        if widths is not None:
            widths[name] = max(widths.get(name, 0), len(number))
            number = number.rjust(widths[name])
        figures.append(f"{name}{of}{number}")
    return between.join(figures)
