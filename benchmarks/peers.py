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
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import workloads
from .contestants import CONTESTANTS, DEFAULT, PLAIN
from .results import Measured, Spread, complaints, differences
from .runs import Runner, import_seconds, interleaved
from .tables import details, overview, spread, table
from .worker import OPERATIONS, Job


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
    add("--repeats", type=int, default=5, help="turns of each contestant")
    add("--threads", type=int, default=1, help="of torch")
    add("--data-dir", default="data", help="where MNIST may be")
    add("--journal", type=Path, help="keep results here; go on if some are there")
    add("--no-check", dest="check", action="store_false",
        help="don't compare losses first")  # fmt: skip
    args = parser.parse_args(arguments)
    for name in args.workloads:
        try:
            workloads.find(name)
        except ValueError as error:
            parser.error(str(error))
    return args


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    args = parse_arguments(arguments)
    names = [PLAIN, *(name for name in args.contestants if name != PLAIN)]
    installed = [name for name in names if CONTESTANTS[name].is_installed]
    for name in names:
        if name not in installed:
            print(f"{name}: not installed, left out")
    unlike = 0
    with tempfile.TemporaryDirectory(prefix="ipufit-benchmarks-") as folder:
        runner = Runner(Path(folder), args.journal, _report)
        measured = Measured()
        for workload in args.workloads:
            jobs = [
                Job(
                    workload,
                    name,
                    tuple(one for one in OPERATIONS if one in args.operations),
                    args.threads,
                    data_dir=str(Path(args.data_dir).absolute()),
                )
                for name in installed
            ]
            if args.check:
                unlike += check(runner, jobs)
            for job, result in interleaved(runner, jobs, args.repeats):
                measured.add(job, result)
            rows = [row for row in measured.rows() if row.workload == workload]
            for operation in args.operations:
                part = [row for row in rows if row.operation == operation]
                if part:
                    title = workloads.find(workload).title
                    print(f"\n{workload} ({title}): {operation}\n{details(part)}")
        imports = measure_imports(runner, installed, args.repeats)
    print(f"\n{overview(measured.rows())}\n\n{imports}")
    for absence in measured.absences():
        print(
            f"{absence.workload} {absence.operation} {absence.contestant}: "
            f"{absence.reason}"
        )
    return 1 if unlike else 0


def check(runner: Runner, jobs: list[Job]) -> int:
    """Compare what contestants learn from unshuffled data with the plain loop.

    Returns:
        How many differ.
    """
    figures: dict[str, Any] = {}
    unlike = 0
    for job in jobs:
        result = runner.run(_unshuffled(job), 0)
        if "failed" in result:
            continue  # the measurement will say so
        figures[job.contestant] = result["figures"]
        plain = figures[PLAIN]
        epochs = 1 + workloads.find(job.workload).epochs
        said = complaints(figures[job.contestant], plain, epochs)
        unlike += bool(said)
        far = differences(figures[job.contestant], plain)
        text = ", ".join(f"{name} {value:.1e}" for name, value in far.items())
        verdict = "; ".join(said) or "as the plain loop"
        print(f"{job.workload} {job.contestant}: {verdict} ({text})", flush=True)
    return unlike


def _unshuffled(job: Job) -> Job:
    return Job(**{**vars(job), "shuffle": False})


def measure_imports(runner: Runner, names: list[str], repeats: int) -> str:
    """A table of what imports cost beyond torch."""
    statements = {
        name: CONTESTANTS[name].imports for name in names if CONTESTANTS[name].imports
    }
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats):
        for statement in dict.fromkeys(statements.values()):
            seconds.setdefault(statement, []).append(import_seconds(runner, statement))
    return table(
        ["import beyond torch", "CPU s"],
        [[f"`{name}`", spread(Spread.of(each))] for name, each in seconds.items()],
    )


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
