# SPDX-License-Identifier: Apache-2.0
"""ipufit beside a plain loop, a tuned one, and other fit APIs.

    python -m benchmarks.peers --workloads W1 W2 --repeats 5

Contestants take turns, each time in a process of its own, on the same samples from the
same weights. First each trains once unshuffled, and must report the plain loop's losses
and accuracies. Printed are ratios to the plain loop of the same turn: medians and
ranges; above 1 is faster. Fails if a contestant does other work than the plain loop.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

from . import page, workloads
from .contestants import CONTESTANTS, DEFAULT, PLAIN
from .pictures import draw_speeds
from .results import Measured, complaints, differences
from .runs import Runner
from .tables import costs, speeds
from .worker import OPERATIONS, Job

PARTS = ("peers", "half")
"""Of the page: all contestants, and float16."""


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
    add("--repeats", type=int, default=3, help="turns of each contestant")
    add("--threads", type=int, default=1, help="of torch")
    add("--data-dir", default="data", help="where MNIST may be")
    add("--journal", type=Path, help="keep results here; go on if some are there")
    add("--write", choices=PARTS, help="put the results into docs/, as this part")
    args = parser.parse_args(arguments)
    for name in args.workloads:
        try:
            workloads.find(name)
        except ValueError as error:
            parser.error(str(error))
    if args.write and importlib.util.find_spec("matplotlib") is None:
        parser.error("--write draws a picture: python -m pip install matplotlib")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    args = parse_arguments(arguments)
    base = args.baseline
    names = [base, *(name for name in args.contestants if name != base)]
    installed = [name for name in names if CONTESTANTS[name].is_installed]
    data_dir = str(Path(args.data_dir).absolute())
    operations = tuple(one for one in OPERATIONS if one in args.operations)
    measured, runner, unlike = Measured(base), Runner(args.journal), 0
    for workload in args.workloads:
        jobs = [
            Job(workload, name, operations, args.threads, data_dir=data_dir)
            for name in installed
        ]
        unlike += check(runner, jobs)
        for job, result in runner.interleaved(jobs, args.repeats):
            measured.add(job, result)
    rows = measured.rows()
    tables = [speeds(rows, operation, base) for operation in operations]
    absent = [f"{name}: not installed." for name in names if name not in installed]
    absent += [
        f"{CONTESTANTS[one.contestant].title}, {one.workload}, {one.operation}: "
        f"{one.reason}."
        for one in measured.absences()
    ]
    beside = "\n".join(f"- {line}" for line in absent)
    print("\n\n".join([*tables, costs(rows), beside]))
    if args.write:
        page.write(f"peers --write {args.write}", _settings(args), *tables, beside)
    if args.write == "peers":
        draw_speeds(rows, page.DOCS / "benchmarks-peers.svg")
        page.write("page", page.summary(rows))
    return 1 if unlike else 0


def check(runner: Runner, jobs: list[Job]) -> int:
    """Compare what contestants learn from unshuffled data with the first of them.

    Returns:
        How many differ.
    """
    figures: dict[str, Any] = {}
    unlike = 0
    for job in jobs:
        result = runner.run(dataclasses.replace(job, shuffle=False), 0)
        if "failed" in result:
            continue  # the measurement will say so
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


def _settings(args: argparse.Namespace) -> str:
    data = Path(args.data_dir, "MNIST", "raw")
    return (
        f"{page.machine()} {args.repeats} turns each, threads: {args.threads}. W1 and "
        f"W3 on {'MNIST' if data.is_dir() else 'synthetic images of its shape'}."
    )


if __name__ == "__main__":
    sys.exit(main())
