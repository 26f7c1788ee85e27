# SPDX-License-Identifier: Apache-2.0
"""The numbers of a picture as a table, for those who don't see it."""

from __future__ import annotations

from typing import NamedTuple

from .amounts import amount_in_words, share_in_words
from .bar_chart import Bar, BarChart
from .timeline import Timeline

LEFT_OUT = "…"
"""Sign for columns of a timeline that aren't drawn."""


class Table(NamedTuple):
    """A table of texts; the first cell of a row is its name.

    Attributes:
        title: A few words.
        caption: Sentences about it.
        header: Names of the columns.
        rows: Texts, as many in each row as in the header.
    """

    title: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def table_of_timeline(timeline: Timeline) -> Table:
    """The numbers in a timeline: a row for each row, a column for each column.

    Example:
        >>> from ipufit.pictures import Row
        >>> row = Row("stage 0", "0", "forward", (0, 1))
        >>> table_of_timeline(Timeline("", "", "cycle", (0, 1), (row,))).rows
        (('stage 0', '0', '1'), ('at work', '1', '1'))
    """

    def texts(numbers: tuple[int | None, ...]) -> tuple[str, ...]:
        return tuple(
            LEFT_OUT if column is None else "" if number is None else str(number)
            for number, column in zip(numbers, timeline.columns)
        )

    return Table(
        timeline.title,
        timeline.caption,
        (timeline.column_name, *texts(timeline.columns)),
        (
            *((row.label, *texts(row.cells)) for row in timeline.rows),
            ("at work", *texts(timeline.at_work)),
        ),
    )


def table_of_bars(chart: BarChart) -> Table:
    """The numbers in a chart: a row for each bar, a column for each kind of part.

    Example:
        >>> from ipufit.pictures import Part
        >>> bar = Bar("IPU 0", (Part("weights", 500), Part("activations", 500, True)))
        >>> table = table_of_bars(BarChart("", "", "B", (bar,), limit=2000))
        >>> table.header
        ('', 'weights', 'activations', 'total', 'of 2.00 KB')
        >>> table.rows
        (('IPU 0', '500 B', '~500 B', '~1.00 KB', '50.0%'),)
    """
    limit = chart.limit
    whole = "all" if limit is None else amount_in_words(limit, chart.unit)
    return Table(
        chart.title,
        chart.caption,
        ("", *chart.kinds, "total", f"of {whole}"),
        tuple(
            (
                bar.label,
                *(_part(chart, bar, kind) for kind in chart.kinds),
                total_in_words(chart, bar),
                share_in_words(chart.share_of(bar)),
            )
            for bar in chart.bars
        ),
    )


def total_in_words(chart: BarChart, bar: Bar) -> str:
    """The sum of a bar's parts."""
    return amount_in_words(bar.total, chart.unit, bar.is_estimate)


def limit_in_words(chart: BarChart) -> str:
    """The limit's name and amount, and whether it is drawn; empty without a limit."""
    if chart.limit is None:
        return ""
    told = f"{chart.limit_name}: {amount_in_words(chart.limit, chart.unit)}"
    return told if chart.has_limit_in_sight else f"{told}, far beyond these bars"


def _part(chart: BarChart, bar: Bar, kind: str) -> str:
    for part in bar.parts:
        if part.kind == kind:
            return amount_in_words(part.amount, chart.unit, part.is_estimate)
    return ""
