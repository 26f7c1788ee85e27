# SPDX-License-Identifier: Apache-2.0
"""Figures of matplotlib: timelines and bars one below the other, measured in pixels."""

from __future__ import annotations

import textwrap
from typing import Any, NamedTuple, Sequence

from ipufit._optional import need

from .amounts import share_in_words
from .bar_chart import Bar, BarChart
from .contents import Picture
from .tables import LEFT_OUT, limit_in_words, total_in_words
from .timeline import Timeline

Axes = Any
"""`matplotlib.axes.Axes`, which needn't be installed."""

Figure = Any
"""`matplotlib.figure.Figure`."""

INK = "#1f2328"
"""Colour of texts and lines on the background."""

WIDTH = 720
"""Pixels of a picture across, unless a timeline needs more."""

STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],  # the first comes with matplotlib
    "font.size": 9,  # points: 12 pixels
    "text.color": INK,
    "text.parse_math": False,  # a label may have a "$"
    "hatch.linewidth": 0.8,
    "svg.fonttype": "none",  # letters stay letters: small, and they can be searched
    "svg.hashsalt": "ipufit",  # the same names inside of the file each time
}
"""Settings of matplotlib, over its own defaults, to draw and to write."""

_DPI = 96
_ON_COLOUR = "#000000"
# Light enough for black letters, and told apart without red and green.
_COLOURS = ("#8ec1e8", "#f6b26b", "#c9b3e6", "#9fd3b6", "#e8d174", "#e3a1b5", "#b8c0c8")
_EDGE, _IDLE = "#8a939c", "#8a939c"
_MARGIN = 12
_ROW, _LINE = 22, 16
_LETTER = 7
"""Pixels that a letter or digit takes, with some air."""
_TOTALS = 150
_WORDS = 110
"""Characters in a line of a caption, as wide as `WIDTH`."""


class _Sheet(NamedTuple):
    """A figure with places in pixels from its upper left corner."""

    figure: Figure
    width: float
    height: float

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes without a frame, one unit a pixel, y downwards."""
        bottom = self.height - top - height
        place = (
            left / self.width,
            bottom / self.height,
            width / self.width,
            height / self.height,
        )
        axes = self.figure.add_axes(place)
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        axes.axis("off")
        return axes


def figure_of(pictures: Sequence[Picture], who: str) -> Figure:
    """Draw pictures one below the other; call it within the settings of `STYLE`.

    Args:
        pictures: One or more.
        who: Function that draws, for messages.

    Returns:
        A figure that belongs to no window and isn't kept by pyplot.

    Raises:
        ConfigError: matplotlib isn't installed.
    """
    make = need("matplotlib.figure", who, "ipufit[plot]").Figure
    sizes = [_size(picture) for picture in pictures]
    width = max(width for width, _ in sizes)
    height = sum(height for _, height in sizes)
    figure = make(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
    sheet = _Sheet(figure, width, height)
    top = 0.0
    for picture, (_, own_height) in zip(pictures, sizes):
        below = _draw_words(sheet, picture, top)
        if isinstance(picture, Timeline):
            _draw_timeline(sheet, picture, below)
        else:
            _draw_bars(sheet, picture, below)
        top += own_height
    return figure


def _size(picture: Picture) -> tuple[float, float]:
    """Width and height in pixels, title and caption included."""
    words = 34 + _LINE * len(_caption(picture))
    if isinstance(picture, Timeline):
        cells = _cell_width(picture) * len(picture.columns)
        wide = max(WIDTH, _left(picture) + cells + _MARGIN)
        return wide, words + _ROW * (len(picture.rows) + 2) + 20
    limit = _LINE if picture.limit is not None else 0
    rows = len(_legend(picture)) + len(picture.bars)
    return WIDTH, words + _ROW * rows + limit + 16


def _left(picture: Picture) -> float:
    """Pixels to the left of cells or bars, for names."""
    things = picture.rows if isinstance(picture, Timeline) else picture.bars
    longest = max([14, *(len(one.label) for one in things)])
    return _MARGIN + _LETTER * longest


def _caption(picture: Picture) -> list[str]:
    return textwrap.wrap(picture.caption, _WORDS)


def _draw_words(sheet: _Sheet, picture: Picture, top: float) -> float:
    """Write title and caption, and say where they end."""
    lines = _caption(picture)
    axes = sheet.axes(0, top, sheet.width, 34 + _LINE * len(lines))
    axes.text(_MARGIN, 18, picture.title, va="center", fontsize=10.5, fontweight="bold")
    for place, line in enumerate(lines):
        axes.text(_MARGIN, 36 + _LINE * place, line, va="center")
    return top + 34 + _LINE * len(lines)


# Timelines ----------------------------------------------------------------------------


def _cell_width(timeline: Timeline) -> float:
    """Pixels of a column: as many as there are, but enough for its digits."""
    every = [*timeline.columns, *timeline.at_work]
    every += [cell for row in timeline.rows for cell in row.cells]
    digits = max([1, *(len(str(one)) for one in every if one is not None)])
    room = (WIDTH - _left(timeline) - _MARGIN) / max(len(timeline.columns), 1)
    return max(min(room, 32), _LETTER * digits + 5)


def _draw_timeline(sheet: _Sheet, timeline: Timeline, top: float) -> None:
    """Cells with their numbers; above them the columns, below them rows at work."""
    left, pitch = _left(timeline), _cell_width(timeline)
    centres = [left + (place + 0.5) * pitch for place in range(len(timeline.columns))]
    height = _ROW * (len(timeline.rows) + 2)
    axes = sheet.axes(0, top, sheet.width, height)
    colours = dict(zip(timeline.kinds, _COLOURS))
    _label(axes, timeline.column_name, _ROW / 2)
    _draw_numbers(axes, timeline.columns, centres, _ROW / 2)
    for number, row in enumerate(timeline.rows, 1):
        y = float(number * _ROW)
        _label(axes, row.label, y + _ROW / 2)
        busy = [place for place, cell in enumerate(row.cells) if cell is not None]
        spans = [(left + place * pitch + 0.5, pitch - 1) for place in busy]
        colour = colours.get(row.kind, _COLOURS[-1])
        axes.broken_barh(spans, (y + 1.5, _ROW - 3), facecolors=colour)
        for place in busy:
            told = str(row.cells[place])
            _centred(axes, told, centres[place], y + _ROW / 2, _ON_COLOUR)
        for place, column in enumerate(timeline.columns):
            if column is None:
                _centred(axes, LEFT_OUT, centres[place], y + _ROW / 2, INK)
        idle = [
            centres[place]
            for place, (column, cell) in enumerate(zip(timeline.columns, row.cells))
            if column is not None and cell is None
        ]
        axes.plot(idle, [y + _ROW / 2] * len(idle), ".", color=_IDLE, markersize=2.5)
    y = _ROW * (len(timeline.rows) + 1.5)
    _label(axes, f"at work, of {len(timeline.rows)}", y)
    _draw_numbers(axes, timeline.at_work, centres, y)


def _draw_numbers(
    axes: Axes, numbers: Sequence[int | None], centres: Sequence[float], y: float
) -> None:
    """A number for each column, or the sign for columns that are left out."""
    for number, x in zip(numbers, centres):
        _centred(axes, LEFT_OUT if number is None else str(number), x, y, INK)


# Bars ---------------------------------------------------------------------------------


def _draw_bars(sheet: _Sheet, chart: BarChart, top: float) -> None:
    """A legend, the bars with their totals, and the line of the limit."""
    limit_room = _LINE if chart.limit is not None else 0
    legend, left = _legend(chart), _left(chart)
    above = _ROW * len(legend)
    bottom = above + _ROW * len(chart.bars)
    height = bottom + limit_room
    axes = sheet.axes(0, top, sheet.width, height)
    colour_of = {
        kind: _COLOURS[place % len(_COLOURS)] for place, kind in enumerate(chart.kinds)
    }
    for row, kinds in enumerate(legend):
        _draw_legend(axes, chart, {kind: colour_of[kind] for kind in kinds}, row)
    room = WIDTH - left - _TOTALS
    for number, bar in enumerate(chart.bars):
        y = above + _ROW * (number + 0.5)
        _label(axes, bar.label, y)
        x = left
        for part in bar.parts:
            across = part.amount / chart.scale * room
            colour = colour_of[part.kind]
            _block(axes, x, y, (across, _ROW - 6), colour, part.is_estimate)
            x += across
        axes.text(left + room + 10, y, _told(chart, bar), va="center")
    if chart.limit is not None:
        x = left + room
        if chart.has_limit_in_sight:
            x = left + chart.limit / chart.scale * room
            axes.plot([x, x], [above, bottom], color=INK, linewidth=1.5)
        told = limit_in_words(chart)
        side = "left" if x < WIDTH / 2 else "right"
        axes.text(x, bottom + _LINE / 2, told, ha=side, va="center")


def _told(chart: BarChart, bar: Bar) -> str:
    is_over = chart.limit is not None and bar.total > chart.limit
    share = share_in_words(chart.share_of(bar))
    return f"{total_in_words(chart, bar)}, {share}{' !' if is_over else ''}"


def _legend(chart: BarChart) -> list[list[str]]:
    """The kinds in rows, as many in each as fit."""
    rows: list[list[str]] = [[]]
    x = 0.0
    for kind in chart.kinds:
        across = _entry_width(chart, kind)
        if rows[-1] and x + across > WIDTH - 2 * _MARGIN:
            rows.append([])
            x = 0.0
        rows[-1].append(kind)
        x += across
    return rows


def _entry(chart: BarChart, kind: str) -> str:
    return f"{kind} (estimate)" if kind in chart.estimated_kinds else kind


def _entry_width(chart: BarChart, kind: str) -> float:
    return 36 + _LETTER * len(_entry(chart, kind))


def _draw_legend(
    axes: Axes, chart: BarChart, colour_of: dict[str, str], row: int
) -> None:
    """A square and the name of each kind, from left to right."""
    x, y = float(_MARGIN), _ROW * (row + 0.5)
    for kind, colour in colour_of.items():
        _block(axes, x, y, (12, 12), colour, kind in chart.estimated_kinds)
        axes.text(x + 18, y, _entry(chart, kind), va="center")
        x += _entry_width(chart, kind)


def _block(
    axes: Axes,
    x: float,
    y: float,
    size: tuple[float, float],
    colour: str,
    is_hatched: bool,
) -> None:
    """A rectangle from x to the right, around y."""
    axes.barh(
        y,
        size[0],
        left=x,
        height=size[1],
        color=colour,
        edgecolor=_EDGE,
        linewidth=0.5,
        hatch="////" if is_hatched else None,
    )


# Texts --------------------------------------------------------------------------------


def _label(axes: Axes, text: str, y: float) -> None:
    axes.text(_MARGIN, y, text, va="center")


def _centred(axes: Axes, text: str, x: float, y: float, colour: str) -> None:
    axes.text(x, y, text, ha="center", va="center", color=colour)
