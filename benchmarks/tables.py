# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown, which are readable in a terminal too."""

from __future__ import annotations

from typing import Sequence

from .contestants import CONTESTANTS
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


def speeds(rows: Sequence[Row], operation: str, baseline: str) -> str:
    """CPU speeds of an operation: a line per contestant, a column per workload."""
    rows = [row for row in rows if row.operation == operation]
    columns = list(dict.fromkeys(row.workload for row in rows))
    cells = {(row.contestant, row.workload): spread(row.speed) for row in rows}
    lines = [
        [CONTESTANTS[name].title, *(cells.get((name, one), "-") for one in columns)]
        for name in dict.fromkeys(row.contestant for row in rows)
    ]
    heading = f"{operation}; {CONTESTANTS[baseline].title} = 1"
    return table([heading, *columns], lines)


def costs(rows: Sequence[Row]) -> str:
    """What else was measured in training: a line per workload and contestant."""
    heading = ["training", "CPU s of an epoch", "set up s", "first epoch s more"]
    return table(
        [*heading, "memory"],
        [
            [
                f"{row.workload}, {CONTESTANTS[row.contestant].title}",
                f"{row.cpu_seconds.median:.3f}",
                f"{row.set_up_seconds:.2f}",
                f"{row.first_seconds:.2f}",
                spread(row.memory),
            ]
            for row in rows
            if row.operation == "train"
        ],
    )
