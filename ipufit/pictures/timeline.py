# SPDX-License-Identifier: Apache-2.0
"""A timeline: rows of work beside each other, over columns of time."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """The work of one part of a machine over time.

    Attributes:
        label: Name of the part, such as "stage 0, forward".
        mark: A few characters for it, for narrow terminals.
        kind: Kind of its work; rows of a kind have the same colour.
        cells: For each column the number of the piece that is worked on; None while
            there is nothing to do, and where columns are left out.
    """

    label: str
    mark: str
    kind: str
    cells: tuple[int | None, ...]


class Timeline(NamedTuple):
    """Rows of work over columns of time.

    Attributes:
        title: A few words.
        caption: Sentences about it, with the figures that the picture can't show.
        column_name: Name of a column, such as "cycle".
        columns: Numbers of the columns that are drawn; None where some are left out.
        rows: The rows from top to bottom.
        key: Sentence that explains the marks of the rows; empty for none.

    Example:
        >>> first = Row("stage 0", "0", "forward", (0, 1, None))
        >>> second = Row("stage 1", "1", "forward", (None, 0, 1))
        >>> timeline = Timeline("Inference", "", "cycle", (0, 1, 2), (first, second))
        >>> timeline.at_work
        (1, 2, 1)
    """

    title: str
    caption: str
    column_name: str
    columns: tuple[int | None, ...]
    rows: tuple[Row, ...]
    key: str = ""

    @property
    def at_work(self) -> tuple[int | None, ...]:
        """For each column, the rows that work; None where columns are left out."""
        return tuple(
            None
            if column is None
            else sum(row.cells[place] is not None for row in self.rows)
            for place, column in enumerate(self.columns)
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of work, in the order of their first rows."""
        return tuple(dict.fromkeys(row.kind for row in self.rows))
