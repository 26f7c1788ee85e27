# SPDX-License-Identifier: Apache-2.0
"""Rows of `docs/benchmarks.json`: written, read again, put beside older ones."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from .contestants import CONTESTANTS
from .results import Row, Spread
from .tables import rounded
from .worker import OPERATIONS


def record(row: Row) -> dict[str, Any]:
    """A row as JSON has it; lists are median, least and greatest."""
    cached = row.cached_seconds
    return {
        "workload": row.workload,
        "operation": row.operation,
        "contestant": row.contestant,
        "cpu_speed": rounded(row.speed),
        "wall_speed": rounded(row.wall_speed),
        "cpu_seconds": round(row.cpu_seconds.median, 3),
        "set_up_seconds": round(row.set_up_seconds, 2),
        "first_seconds": round(row.first_seconds, 2),
        "cached_seconds": None if cached is None else round(cached, 2),
        "memory": rounded(row.memory),
    }


def recorded(entry: Mapping[str, Any]) -> Row:
    """The row of a record: medians stand for ranges that weren't kept."""
    seconds = entry["cpu_seconds"]
    return Row(
        entry["workload"],
        entry["operation"],
        entry["contestant"],
        Spread(*entry["cpu_speed"]),
        Spread(*entry["wall_speed"]),
        Spread(seconds, seconds, seconds),
        entry["set_up_seconds"],
        entry["first_seconds"],
        entry["cached_seconds"],
        Spread(*entry["memory"]),
    )


def merged(older: Sequence[Row], newer: Sequence[Row]) -> list[Row]:
    """Rows of both, in their usual order; newer ones stand for older ones of a name.

    Workloads keep the order in which they come, contestants have that of `CONTESTANTS`.
    """
    rows = {
        (row.workload, row.operation, row.contestant): row for row in (*older, *newer)
    }
    workloads = list(dict.fromkeys(name for name, _, _ in rows))
    contestants = list(CONTESTANTS)

    def place(key: tuple[str, str, str]) -> tuple[int, int, int]:
        workload, operation, contestant = key
        return (
            workloads.index(workload),
            OPERATIONS.index(operation),
            contestants.index(contestant),
        )

    return [rows[key] for key in sorted(rows, key=place)]


def settings_merged(older: str, newer: str, rows: Sequence[Row]) -> str:
    """What is said of the machine: what was measured again has a paragraph of its own.

    Args:
        older: Settings of the rows that were there.
        newer: Settings of the rows that were measured now.
        rows: What was measured now.
    """
    titles = [CONTESTANTS[row.contestant].title for row in rows]
    workloads = [row.workload for row in rows]
    names, places = (", ".join(dict.fromkeys(each)) for each in (titles, workloads))
    again = f"Measured later ({names}; on {places}): "
    kept = [one for one in older.split("\n\n") if not one.startswith(again)]
    return "\n\n".join([*kept, again + newer])
