# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown, which are readable in a terminal too."""

from __future__ import annotations

from typing import Sequence

from .contestants import CONTESTANTS, PLAIN
from .results import Row, Spread


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with columns of one width.

    Example:
        >>> print(table(["name", "x"], [["a", "1"], ["bc", "22"]]))
        | name |  x |
        |------|---:|
        | a    |  1 |
        | bc   | 22 |
    """
    cells = [heading, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heading))]
    widths[1:] = [max(2, width) for width in widths[1:]]

    def line(row: Sequence[str]) -> str:
        first = row[0].ljust(widths[0])
        others = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        return "| " + " | ".join([first, *others]) + " |"

    rule = "|" + "-" * (widths[0] + 2)
    rule += "".join("|" + "-" * (width + 1) + ":" for width in widths[1:]) + "|"
    return "\n".join([line(heading), rule, *map(line, rows)])


def spread(value: Spread, digits: int = 2) -> str:
    """Median, and the range if there was more than one repeat.

    Example:
        >>> spread(Spread(1.25, 1.2, 1.31)), spread(Spread(2.0, 2.0, 2.0))
        ('1.25 (1.20-1.31)', '2.00')
    """
    middle = f"{value.median:.{digits}f}"
    if value.low == value.high:
        return middle
    return f"{middle} ({value.low:.{digits}f}-{value.high:.{digits}f})"


def rounded(value: Spread, digits: int = 2) -> list[float]:
    """Median, least and greatest as a table has them.

    Example:
        >>> rounded(Spread(1.251, 1.2, 1.314))
        [1.25, 1.2, 1.31]
    """
    return [round(one, digits) for one in value]


def overview(rows: Sequence[Row], baseline: str = PLAIN) -> str:
    """Medians of CPU speed: a line per contestant, a column per operation."""
    columns = list(dict.fromkeys((row.workload, row.operation) for row in rows))
    names = list(dict.fromkeys(row.contestant for row in rows))
    cells = {(row.contestant, row.workload, row.operation): row for row in rows}
    lines = []
    for name in names:
        line = [CONTESTANTS[name].title]
        for column in columns:
            row = cells.get((name, *column))
            line.append("-" if row is None else f"{row.speed.median:.2f}")
        lines.append(line)
    first = f"CPU speed, {CONTESTANTS[baseline].title} = 1"
    heading = [first, *(" ".join(one) for one in columns)]
    return table(heading, lines)


def details(rows: Sequence[Row]) -> str:
    """Everything that was measured of one workload's operation."""
    heading = [
        "contestant",
        "CPU speed",
        "wall speed",
        "CPU s",
        "set up s",
        "first use s",
        "cached s",
        "memory",
    ]
    return table(
        heading,
        [
            [
                CONTESTANTS[row.contestant].title,
                spread(row.speed),
                spread(row.wall_speed),
                f"{row.cpu_seconds.median:.3f}",
                f"{row.set_up_seconds:.2f}",
                f"{row.first_seconds:.2f}",
                "-" if row.cached_seconds is None else f"{row.cached_seconds:.2f}",
                spread(row.memory),
            ]
            for row in rows
        ],
    )
