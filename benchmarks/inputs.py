# SPDX-License-Identifier: Apache-2.0
"""A dataset that is read sample by sample: `fit` beside a loop over a `DataLoader`.

    python -m benchmarks.inputs --data-dir data --repeats 5

torchvision's MNIST with its usual transforms if both are there, else drawings that cost
as much. The network is the MNIST tutorial's. Everybody reads the same samples with the
same number of workers; "workers kept" is `DataLoader(persistent_workers=True)`. Ways
take turns, each in a process of its own; CPU time is that of the workers, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any, Iterable, Sequence

from . import page
from .reading import SOURCES, WAYS, Reading
from .results import Spread
from .runs import Runner, caches, stop_in_order
from .tables import rounded, spread, table

_MICRO = 1e6


def rows_of(taken: dict[Reading, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of `docs/benchmarks.json`: ratios to the plain loop with as many workers.

    Args:
        taken: What processes measured, turn by turn.
    """
    rows = []
    for reading, turns in taken.items():
        plain = taken[dataclasses.replace(reading, way="plain")]
        samples = reading.samples * reading.epochs
        rows.append(
            {
                "source": turns[0]["source"],
                "workers": reading.workers,
                "way": reading.way,
                **{
                    f"{clock}_speed": rounded(_ratios(turns, plain, clock))
                    for clock in ("cpu", "wall")
                },
                "cpu_us_per_sample": rounded(
                    Spread.of(_MICRO * one["cpu"] / samples for one in turns), 1
                ),
            }
        )
    return rows


def _ratios(
    mine: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]], clock: str
) -> Spread:
    return Spread.of(other[clock] / one[clock] for one, other in zip(mine, plain))


def report(rows: Iterable[dict[str, Any]]) -> str:
    """A table with a line for each way and number of workers."""
    heading = ["sample by sample", "workers", "speed by CPU time", "by the clock"]
    heading += ["CPU us a sample"]
    return table(
        heading,
        [
            [
                WAYS[row["way"]],
                str(row["workers"]),
                spread(Spread(*row["cpu_speed"])),
                spread(Spread(*row["wall_speed"])),
                spread(Spread(*row["cpu_us_per_sample"]), 0),
            ]
            for row in rows
        ],
    )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The switches."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--workers", nargs="+", type=int, default=[0, 2], help="that load")
    add("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    add("--source", choices=SOURCES, help="of samples; MNIST if it is there")
    add("--samples", type=int, default=8000, help="of an epoch")
    add("--epochs", type=int, default=2, help="that are measured, after one")
    add("--repeats", type=int, default=5, help="turns of each way")
    add("--data-dir", default="data", help="where MNIST may be")
    add("--journal", type=Path, help="keep results here; go on if some are there")
    add("--write", action="store_true", help="put the results into docs/")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    args = parse_arguments(arguments)
    ways = ["plain", *(name for name in args.ways if name != "plain")]
    readings = [
        Reading(
            way,
            workers,
            args.samples,
            args.epochs,
            args.source,
            str(Path(args.data_dir).absolute()),
        )
        for workers in args.workers
        for way in ways
        if workers or way != "plain-kept"  # there is nobody to keep
    ]
    taken: dict[Reading, list[dict[str, Any]]] = {one: [] for one in readings}
    with caches(args.journal) as folder:
        runner = Runner(folder, args.journal, _report)
        for repeat in range(args.repeats):
            for reading in readings:
                title = f"{reading.way}, {reading.workers} workers"
                asked = dataclasses.asdict(reading)
                answer = runner.call("benchmarks.reading", asked, repeat, title)
                if "failed" in answer:
                    raise RuntimeError(f"{title}: {answer['failed']}")
                taken[reading].append(answer)
    rows = rows_of(taken)
    text = report(rows)
    print(f"{rows[0]['source']}, {args.samples} samples\n\n{text}")
    if args.write:
        settings = f"{page.machine()} {args.repeats} turns each, threads: 1. "
        settings += f"{args.samples} samples of {rows[0]['source']}."
        page.write("inputs", settings, [text], rows)
    return 0


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    stop_in_order()
    sys.exit(main())
