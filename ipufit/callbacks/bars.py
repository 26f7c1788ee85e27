# SPDX-License-Identifier: Apache-2.0
"""Progress bar that is redrawn on a terminal or in a notebook."""

from __future__ import annotations

from typing import Callable, Iterable

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from .figure_text import in_lines

_WIDTH = 20
_LEAST_WIDTH = 4
_ELAPSED = len("0:00:00")


class FiguresBar(Progress):
    """Bar with figures beside it, or below it if the terminal is too narrow."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bar and its figures for rich to draw."""
        bar = self.make_tasks_table(self.tasks)
        figures = self.tasks[0].fields["figures"] if self.tasks else ""
        if not figures:
            yield bar
            return
        width = self.console.width
        taken = Measurement.get(self.console, self.console.options, bar).maximum
        if taken + 1 + len(figures) <= width:
            row = Table.grid(padding=(0, 1))
            row.add_row(bar, Text(figures))
            yield row
        else:
            yield bar
            yield Text(in_lines(figures, width))


def figures_bar(
    console: Console, clock: Callable[[], float], title: str, total: int | None
) -> FiguresBar:
    """Return a bar, not started yet, that fits its numbers on one line.

    Args:
        clock: Returns the time in seconds, from any origin.
        title: Text in front of the bar, such as "Epoch 1/3".
        total: Number of updates or batches to come; None if unknown.
    """
    counts = 2 * len(str(total or 9999)) + 1
    room = console.width - len(title) - counts - _ELAPSED - 3
    columns: list[ProgressColumn] = [TextColumn("{task.description}")]
    if room >= _LEAST_WIDTH:
        columns.append(BarColumn(bar_width=min(_WIDTH, room)))
    columns += [MofNCompleteColumn(), TimeElapsedColumn()]
    return FiguresBar(*columns, console=console, get_time=clock, refresh_per_second=10)
