# SPDX-License-Identifier: Apache-2.0
"""What the bar and the default callbacks cost."""

from __future__ import annotations

from pathlib import Path

from .results import Measured, Spread
from .runs import Runner, interleaved
from .tables import spread, table
from .worker import Job

WORKLOADS = ("W1", "W2")


def measure_bars(
    runner: Runner, repeats: int, threads: int, data_dir: Path | None
) -> str:
    """A table of what a fit at a terminal takes more than one that shows nothing.

    Both keep a `History`; the one at the terminal draws its bar into it.
    """
    measured = Measured(baseline="ipufit")
    for workload in WORKLOADS:
        jobs = [
            Job(
                workload,
                name,
                ("train",),
                threads,
                data_dir=None if data_dir is None else str(data_dir),
            )
            for name in ("ipufit", "ipufit-bar")
        ]
        for job, result in interleaved(runner, jobs, repeats):
            measured.add(job, result)
    rows = [row for row in measured.rows() if row.contestant == "ipufit-bar"]
    return table(
        ["bar and default callbacks on", "CPU time more, %"],
        [[f"{row.workload} train", spread(_more(row.speed), 1)] for row in rows],
    )


def _more(speed: Spread) -> Spread:
    """From how much slower to how many percent more."""
    return Spread.of(100 * (1 / value - 1) for value in speed)
