# SPDX-License-Identifier: Apache-2.0
"""Pictures as lines of characters, from 40 columns on; colours only repeat them."""

from __future__ import annotations

from typing import Iterator

from rich.text import Text

from .amounts import share_in_words
from .bar_chart import Bar, BarChart
from .contents import Content
from .tables import Table, limit_in_words, table_of_bars, total_in_words
from .timeline import Timeline

_COLOURS = ("blue", "yellow", "magenta", "cyan", "green", "red", "white")
_FILLS = "█▓▒░▚▞▤▥"
_ASCII_FILLS = "#=+-ox%@"
_LEAST_BAR = 20
"""Characters that a bar has at least, beside its name and total."""
_MOST_BAR = 80


def lines_of(picture: Content, width: int, *, is_ascii: bool = False) -> list[Text]:
    """A picture as lines.

    Args:
        picture: The timeline, chart or table.
        width: Characters of a line, about 40 or more.
        is_ascii: If True, no other characters than those of ASCII are used.

    Returns:
        Lines of at most `width` characters; words of labels aren't broken.
    """
    lines = [*wrapped(picture.title, width, "bold"), *wrapped(picture.caption, width)]
    if isinstance(picture, Timeline):
        lines += wrapped(picture.key, width)
        lines += _of_timeline(picture, width, is_ascii)
    elif isinstance(picture, BarChart):
        lines += _of_bars(picture, width, is_ascii)
        if len(picture.kinds) > 1:  # else all numbers stand beside the bars
            lines += [Text(), *_of_table(table_of_bars(picture), width)]
    else:
        lines += _of_table(picture, width)
    return lines


# Timelines ----------------------------------------------------------------------------


def _of_timeline(timeline: Timeline, width: int, is_ascii: bool) -> Iterator[Text]:
    """Rows over columns, in blocks one below the other where they are too wide."""
    idle, left_out = (".", "~") if is_ascii else ("·", "…")
    colours = dict(zip(timeline.kinds, _COLOURS))
    rows = [(row.mark, row.cells, colours.get(row.kind, "")) for row in timeline.rows]
    rows.append(("at work", timeline.at_work, ""))
    numbers = [number for _, cells, _ in rows for number in cells if number is not None]
    pitch = 1 + max([1, *(len(str(number)) for number in numbers)])
    left = max(len(timeline.column_name), *(len(mark) for mark, _, _ in rows))
    at_once = max((width - left) // pitch, 1)
    for first in range(0, len(timeline.columns), at_once):
        block = slice(first, first + at_once)
        yield Text()
        name = timeline.column_name
        yield Text(_heads(name, left, timeline.columns[block], pitch), "dim")
        for mark, cells, colour in rows:
            line = Text(mark.ljust(left))
            for column, cell in zip(timeline.columns[block], cells[block]):
                sign = left_out if column is None else idle
                told = sign if cell is None else str(cell)
                line.append(told.rjust(pitch), "dim" if cell is None else colour)
            yield line


def _heads(name: str, left: int, columns: tuple[int | None, ...], pitch: int) -> str:
    """Numbers of columns over their last digits, as many as don't touch."""
    line = name
    for place, column in enumerate(columns, 1):
        told = "" if column is None else str(column)
        start = left + place * pitch - len(told)
        if told and start > len(line):
            line = line.ljust(start) + told
    return line


# Bars ---------------------------------------------------------------------------------


def _of_bars(chart: BarChart, width: int, is_ascii: bool) -> Iterator[Text]:
    """A line for each bar; two where name and total leave too few characters."""
    fills = _ASCII_FILLS if is_ascii else _FILLS
    style_of = {
        kind: (fills[place % len(fills)], _COLOURS[place % len(_COLOURS)])
        for place, kind in enumerate(chart.kinds)
    }
    names = max([len(bar.label) for bar in chart.bars], default=0)
    totals = [_told(chart, bar) for bar in chart.bars]
    ends = max(map(len, totals), default=0)
    room = min(width - names - ends - 4, _MOST_BAR)
    has_room = room >= _LEAST_BAR
    yield Text()
    for bar, total in zip(chart.bars, totals):
        if has_room:
            line = Text(f"{bar.label.ljust(names)}  ")
            yield line + _bar(chart, bar, room, style_of, is_ascii) + Text(f"  {total}")
        else:
            yield from wrapped(f"{bar.label}: {total}", width)
            line = _bar(chart, bar, width, style_of, is_ascii)
            line.rstrip()
            yield line
    legend = [
        f"{fill} {kind}{' (estimate)' if kind in chart.estimated_kinds else ''}"
        for kind, (fill, _) in style_of.items()
    ]
    if chart.has_limit_in_sight:
        legend.append(f"{'|' if is_ascii else '┃'} {limit_in_words(chart)}")
    yield from _packed(legend, width)
    if not chart.has_limit_in_sight:
        yield from wrapped(limit_in_words(chart), width)


def _told(chart: BarChart, bar: Bar) -> str:
    share = share_in_words(chart.share_of(bar))
    is_over = chart.limit is not None and bar.total > chart.limit
    return f"{total_in_words(chart, bar)}, {share}{' (too much)' if is_over else ''}"


def _bar(
    chart: BarChart,
    bar: Bar,
    width: int,
    style_of: dict[str, tuple[str, str]],
    is_ascii: bool,
) -> Text:
    """The characters of a bar; the last column is left for a limit's mark."""
    room = width - 1
    cells: list[tuple[str, str]] = []
    amount = 0.0
    for part in bar.parts:
        amount += part.amount
        end = round(amount / chart.scale * room)
        cells += [style_of[part.kind]] * (end - len(cells))
    cells += [(" ", "")] * (width - len(cells))
    if chart.limit is not None and chart.has_limit_in_sight:
        cells[round(chart.limit / chart.scale * room)] = ("|" if is_ascii else "┃", "")
    return Text.assemble(*cells)


# Tables -------------------------------------------------------------------------------


def _of_table(table: Table, width: int) -> Iterator[Text]:
    """Columns if they have room, else the names of columns before their texts."""
    every = (table.header, *table.rows)
    widths = [max(map(len, column)) for column in zip(*every)]
    if sum(widths) + 2 * (len(widths) - 1) <= width:
        for place, row in enumerate(every):
            first, *others = (
                text.rjust(size) if number else text.ljust(size)
                for number, (text, size) in enumerate(zip(row, widths))
            )
            line = "  ".join([first, *others]).rstrip()
            yield Text(line, "bold" if not place else "")
        return
    for name, *texts in table.rows:
        told = [f"{head} {text}" for head, text in zip(table.header[1:], texts) if text]
        listed = [f"{one}," for one in told[:-1]] + told[-1:]
        yield from _packed([f"{name}:", *listed], width, " ")


# Words --------------------------------------------------------------------------------


def wrapped(text: str, width: int, style: str = "") -> Iterator[Text]:
    """Lines of words; none for an empty text."""
    for line in _packed(text.split(), width, " "):
        line.stylize(style)
        yield line


def _packed(texts: list[str], width: int, between: str = "   ") -> Iterator[Text]:
    """Lines of texts, as many in each as there is room for; none without texts."""
    line = ""
    for text in texts:
        if line and len(line) + len(between) + len(text) > width:
            yield Text(line)
            line = ""
        line = f"{line}{between}{text}" if line else text
    if line:
        yield Text(line)
