# SPDX-License-Identifier: Apache-2.0
"""Plots as SVG text: panels of bars, and panels of lines. No library is needed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Sequence

_COLOURS = ("#1b6ca8", "#d1495b", "#3c8d53", "#8a6bbe")
_EMPHASIS, _OTHERS = _COLOURS[0], "#a9b4bf"
_GREY, _FONT = "#666", "font-family='sans-serif' font-size='11'"
_COLUMNS = 3
_TITLE_HEIGHT = 22.0


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars from 1, on a logarithmic scale.

    Attributes:
        title: Above it.
        values: Label, value above 0, and least and greatest of it.
        emphasized: Labels that stand out.
    """

    title: str
    values: Sequence[tuple[str, float, float, float]]
    emphasized: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Lines:
    """A panel of lines, x on a logarithmic scale of base 2, y from 0.

    Attributes:
        title: Above it.
        x: The values, the same for all lines; 0 stands where a half would.
        y: A line's values by its name.
    """

    title: str
    x: Sequence[float]
    y: dict[str, Sequence[float]]


def bar_chart(panels: Sequence[Bars], caption: str) -> str:
    """Panels of bars, three in a row."""
    labels = max(len(label) for panel in panels for label, *_ in panel.values)
    width, label_width = 300.0, 6.0 * labels + 8
    heights = [len(panel.values) * 16.0 + _TITLE_HEIGHT + 26 for panel in panels]
    edges = [
        edge for panel in panels for _, _, *range_ in panel.values for edge in range_
    ]
    low = min(0.5, 2.0 ** math.floor(math.log2(min(edges))))
    high = max(2.0, 2.0 ** math.ceil(math.log2(max(edges))))

    def position(value: float) -> float:
        return label_width + width * math.log2(value / low) / math.log2(high / low)

    parts = []
    total = label_width + width + 24
    for left, top, panel in _placed(panels, total, max(heights)):
        body = [_text(label_width, 14, panel.title, weight="bold")]
        bottom = _TITLE_HEIGHT + 16.0 * len(panel.values)
        for power in range(round(math.log2(low)), round(math.log2(high)) + 1):
            x = position(2.0**power)
            stroke = "#333" if power == 0 else "#ddd"
            body.append(_line(x, _TITLE_HEIGHT, x, bottom, stroke))
            body.append(_text(x, bottom + 13, _power(power), anchor="middle"))
        for row, (label, value, least, greatest) in enumerate(panel.values):
            y = _TITLE_HEIGHT + 16.0 * row
            colour = _EMPHASIS if label in panel.emphasized else _OTHERS
            start, end = sorted((position(1.0), position(value)))
            body.append(
                f"<rect x='{start:.1f}' y='{y + 3:.1f}' width='{end - start:.1f}' "
                f"height='10' fill='{colour}'/>"
            )
            middle = y + 8
            body.append(_line(position(least), middle, position(greatest), middle))
            body.append(_text(label_width - 5, y + 12, label, anchor="end"))
        parts.append(_group(left, top, body))
    return _document(parts, panels, total, max(heights), caption)


def line_chart(panels: Sequence[Lines], caption: str) -> str:
    """Panels of lines, three in a row."""
    width, height, margin = 240.0, 130.0, 46.0
    total_width, total_height = width + margin + 20, height + _TITLE_HEIGHT + 50
    parts = []
    for left, top, panel in _placed(panels, total_width, total_height):
        greatest = max(value for line in panel.y.values() for value in line)
        step = _round_step(greatest)
        least_x, most_x = _log(min(panel.x)), _log(max(panel.x))
        roof = step * math.ceil(greatest / step)

        def across(value: float, least: float = least_x, most: float = most_x) -> float:
            return margin + width * (_log(value) - least) / ((most - least) or 1.0)

        def down(value: float, most: float = roof) -> float:
            return _TITLE_HEIGHT + height * (1 - value / most)

        body = [_text(margin, 14, panel.title, weight="bold")]
        for i in range(round(roof / step) + 1):
            y = down(i * step)
            body.append(_line(margin, y, margin + width, y, "#ddd"))
            body.append(_text(margin - 5, y + 4, f"{i * step:g}", anchor="end"))
        for x in panel.x:
            foot = _TITLE_HEIGHT + height + 14
            body.append(_text(across(x), foot, _short(x), anchor="middle"))
        for colour, (name, line) in zip(_COLOURS, panel.y.items()):
            points = [f"{across(x):.1f},{down(v):.1f}" for x, v in zip(panel.x, line)]
            body.append(
                f"<polyline points='{' '.join(points)}' fill='none' "
                f"stroke='{colour}' stroke-width='2'/>"
            )
            body += [
                f"<circle cx='{point.split(',')[0]}' cy='{point.split(',')[1]}' r='2.5'"
                f" fill='{colour}'/>"
                for point in points
            ]
            place = list(panel.y).index(name)
            foot = _TITLE_HEIGHT + height + 32
            at = margin + place * width / len(panel.y)
            body.append(_text(at, foot, name, colour=colour))
        parts.append(_group(left, top, body))
    return _document(parts, panels, total_width, total_height, caption)


def _placed(
    panels: Sequence[Bars] | Sequence[Lines], width: float, height: float
) -> list[tuple[float, float, Bars | Lines]]:
    return [
        (width * (number % _COLUMNS), 26 + height * (number // _COLUMNS), panel)
        for number, panel in enumerate(panels)
    ]


def _round_step(greatest: float) -> float:
    """A step of 1, 2 or 5 times a power of ten, for about four of them."""
    power = 10.0 ** math.floor(math.log10(greatest / 4))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= greatest / 4)


def _log(value: float) -> float:
    return math.log2(value or 0.5)


def _power(power: int) -> str:
    """A power of 2, as a fraction below 1."""
    return str(2**power) if power >= 0 else f"1/{2**-power}"


def _short(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def _document(
    parts: list[str],
    panels: Sequence[Bars] | Sequence[Lines],
    width: float,
    height: float,
    caption: str,
) -> str:
    across = width * min(_COLUMNS, len(panels)) + 10
    down = 26 + height * math.ceil(len(panels) / _COLUMNS)
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {across:.0f} "
            f"{down:.0f}' width='{across:.0f}' {_FONT}>",
            f"<title>{escape(caption)}</title>",
            "<rect width='100%' height='100%' fill='white'/>",
            _text(8, 16, caption),
            *parts,
            "</svg>\n",
        ]
    )


def _group(left: float, top: float, body: list[str]) -> str:
    return f"<g transform='translate({left:.1f},{top:.1f})'>{''.join(body)}</g>"


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str = "#222") -> str:
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' "
        f"stroke='{stroke}'/>"
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = _GREY,
    weight: str = "normal",
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{colour}' "
        f"font-weight='{weight}'>{escape(text)}</text>"
    )
