# SPDX-License-Identifier: Apache-2.0
"""ipufit beside a plain loop, the limits of the machine, and other fit APIs.

    python -m benchmarks.peers --workloads W1 W2 --repeats 5

Contestants take turns, each time in a process of its own, on the same samples from the
same weights. First each trains once unshuffled, and must report the plain loop's losses
and accuracies. Printed are ratios to the plain loop of the same turn: medians and
ranges; above 1 is faster. Fails if a contestant does other work than the plain loop.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from . import page, pictures, records, workloads
from .bars import measure_bars
from .contestants import CONTESTANTS, DEFAULT, PLAIN
from .results import Measured, Row, Spread, complaints, differences
from .runs import Runner, caches, import_seconds, interleaved, stop_in_order
from .tables import details, overview, spread, table
from .worker import OPERATIONS, Job

PARTS = ("peers", "networks", "threads", "half", "large")
"""Of the appendix: all contestants, other networks, two threads, float16, large."""
_BESIDE = ("| import ", "| bar ", "- ")  # how paragraphs that are no rows begin


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The switches."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    names = ", ".join(workloads.WORKLOADS)
    add("--workloads", nargs="+", default=list(workloads.DEFAULT), metavar="NAME",
        help=f"{names}; '-g8' after a name for 8 micro-batches per update")  # fmt: skip
    add("--contestants", nargs="+", default=list(DEFAULT), choices=list(CONTESTANTS),
        metavar="NAME", help=", ".join(CONTESTANTS))  # fmt: skip
    add("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    add("--baseline", default=PLAIN, choices=list(CONTESTANTS), metavar="NAME",
        help="whom the others are compared with")  # fmt: skip
    add("--repeats", type=int, default=5, help="turns of each contestant")
    add("--threads", type=int, default=1, help="of torch")
    add("--data-dir", default="data", help="where MNIST may be")
    add("--journal", type=Path, help="keep results here; go on if some are there")
    add("--no-check", dest="check", action="store_false",
        help="don't compare losses first")  # fmt: skip
    add("--bars", type=int, default=0, metavar="TURNS",
        help="measure what the bar costs as well")  # fmt: skip
    add("--write", nargs="?", const="peers", choices=PARTS,
        help="put the results into docs/, as this part")  # fmt: skip
    add("--merge", action="store_true",
        help="keep what this part has of other contestants and workloads")  # fmt: skip
    args = parser.parse_args(arguments)
    for name in args.workloads:
        try:
            workloads.find(name)
        except ValueError as error:
            parser.error(str(error))
    if args.write:
        pictures.refuse_without_matplotlib(parser)
    return args


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    args = parse_arguments(arguments)
    base = args.baseline
    names = [base, *(name for name in args.contestants if name != base)]
    installed = [name for name in names if CONTESTANTS[name].is_installed]
    data_dir = Path(args.data_dir).absolute()
    measured = Measured(base)
    unlike = 0
    with caches(args.journal) as folder:
        runner = Runner(folder, args.journal, _report)
        for workload in args.workloads:
            jobs = [
                Job(
                    workload,
                    name,
                    tuple(one for one in OPERATIONS if one in args.operations),
                    args.threads,
                    data_dir=str(data_dir),
                )
                for name in installed
            ]
            if args.check:
                unlike += check(runner, jobs, measured)
            for job, result in interleaved(runner, jobs, args.repeats):
                measured.add(job, result)
            rows = [row for row in measured.rows() if row.workload == workload]
            print(f"\n{_details(rows)}", flush=True)
        imports = measure_imports(runner, installed, args.repeats)
        bars = ""
        if args.bars:
            bars = measure_bars(runner, args.bars, args.threads, data_dir)
    absent = [f"{name}: not installed." for name in names if name not in installed]
    absent += _absences(measured)
    beside = [imports, bars, "\n".join(absent)]
    print("\n" + "\n\n".join([_overviews(measured.rows(), base), *beside]))
    if args.write:
        beside = [imports, bars, "\n".join(f"- {line}" for line in absent)]
        _write(args, measured.rows(), beside)
    return 1 if unlike else 0


def _write(args: argparse.Namespace, rows: list[Row], beside: list[str]) -> None:
    """Put rows into the docs, and the tables beside them; older ones stay if asked."""
    command, settings = f"peers --write {args.write}", _settings(args)
    known = page.read()[args.write]
    if args.merge and known["rows"]:
        settings = records.settings_merged(known["measured_on"], settings, rows)
        rows = records.merged([records.recorded(one) for one in known["rows"]], rows)
        beside = [one for one in page.paragraphs(command) if one.startswith(_BESIDE)]
    tables = [_overviews(rows, args.baseline), *beside, "### In full", _details(rows)]
    page.write(command, settings, tables, [records.record(row) for row in rows])


def check(runner: Runner, jobs: list[Job], measured: Measured) -> int:
    """Compare what contestants learn from unshuffled data with the first of them.

    Returns:
        How many differ.
    """
    figures: dict[str, Any] = {}
    unlike = 0
    for job in jobs:
        job = dataclasses.replace(job, shuffle=False)
        result = runner.run(job, 0)
        if "failed" in result:
            continue  # the measurement will say so
        measured.add(job, result)
        figures[job.contestant] = result["figures"]
        plain = figures[jobs[0].contestant]
        workload = workloads.find(job.workload)
        samples = min(workload.num_train, workload.test_samples)
        said = complaints(
            figures[job.contestant],
            plain,
            1 + workload.epochs,
            samples,
            CONTESTANTS[job.contestant].tolerance,
        )
        unlike += bool(said)
        far = differences(figures[job.contestant], plain)
        text = ", ".join(f"{name} {value:.1e}" for name, value in far.items())
        verdict = "; ".join(said) or f"as {CONTESTANTS[jobs[0].contestant].title}"
        print(f"{job.workload} {job.contestant}: {verdict} ({text})", flush=True)
    return unlike


def measure_imports(runner: Runner, names: list[str], repeats: int) -> str:
    """A table of what imports cost beyond torch: of the names that are used."""
    statements = ["import ipufit"]  # whose names come when they are first used
    statements += [
        statement for name in names if (statement := CONTESTANTS[name].imports)
    ]
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats):
        for statement in dict.fromkeys(statements):
            seconds.setdefault(statement, []).append(import_seconds(runner, statement))
    return table(
        ["import beyond torch", "CPU s"],
        [[f"`{name}`", spread(Spread.of(each))] for name, each in seconds.items()],
    )


def _overviews(rows: list[Row], baseline: str) -> str:
    """A table for each operation, so that none is too wide."""
    parts = [
        overview([row for row in rows if row.operation == operation], baseline)
        for operation in OPERATIONS
        if any(row.operation == operation for row in rows)
    ]
    return "\n\n".join(parts)


def _details(rows: list[Row]) -> str:
    """A table for each operation of each workload."""
    parts = []
    for name in dict.fromkeys(row.workload for row in rows):
        for operation in OPERATIONS:
            own = [
                row
                for row in rows
                if (row.workload, row.operation) == (name, operation)
            ]
            if own:
                title = workloads.find(name).title
                parts += [f"{name} ({title}): {operation}", details(own)]
    return "\n\n".join(parts)


def _absences(measured: Measured) -> list[str]:
    """A line for each reason, with all that it holds for."""
    lines: dict[tuple[str, str], list[str]] = {}
    for one in measured.absences():
        place = f"{one.workload} {one.operation}"
        lines.setdefault((one.contestant, one.reason), []).append(place)
    return [
        f"{CONTESTANTS[name].title}: {reason} ({', '.join(places)})."
        for (name, reason), places in lines.items()
    ]


def _settings(args: argparse.Namespace) -> str:
    data = Path(args.data_dir, "MNIST", "raw")
    return (
        f"{page.machine()} {args.repeats} turns each, threads: {args.threads}. W1 and "
        f"W3 on {'MNIST' if data.is_dir() else 'synthetic images of its shape'}."
    )


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    stop_in_order()
    sys.exit(main())
