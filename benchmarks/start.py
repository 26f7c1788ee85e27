# SPDX-License-Identifier: Apache-2.0
"""How long the first step takes, beside the plain loop's: imports, tracing, and all.

    python -m benchmarks.start --repeats 5

A start is what a process does from its imports (beyond torch) to the end of its first
weight update. Contestants take turns, each in a process of its own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import page
from .contestants import PLAIN
from .results import Spread
from .runs import Runner, import_seconds
from .tables import spread, table
from .worker import Job

OURS = "ipufit-default"
NETWORKS = ("resnet50", "encoder12")
IMPORT = "from ipufit import IPUConfig, IPUModel"


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--repeats", type=int, default=5, help="turns")
    add("--journal", type=Path, help="keep results here; go on if some are there")
    add("--write", action="store_true", help="put the results into docs/")
    args = parser.parse_args(arguments)
    runner, lines = Runner(args.journal), []
    for name in NETWORKS:
        jobs = [Job(name, one, ("train",)) for one in (PLAIN, OURS)]
        starts: dict[str, list[tuple[float, float, float]]] = {PLAIN: [], OURS: []}
        for job, result in runner.interleaved(jobs, args.repeats):
            timed = result["operations"]["train"]
            seconds = result["set_up"], timed["first"], timed["measured"]
            starts[job.contestant].append(tuple(one["cpu"] for one in seconds))
        for who, each in (("plain loop", starts[PLAIN]), ("ipufit", starts[OURS])):
            cells = [f"{Spread.of(column).median:.2f}" for column in zip(*each)]
            whole = [
                sum(one[:2]) / sum(plain[:2]) for one, plain in zip(each, starts[PLAIN])
            ]
            lines.append([f"{name}, {who}", *cells, spread(Spread.of(whole))])
    heading = ["CPU seconds", "set up", "first step", "later step"]
    text = table([*heading, "until the first step, plain loop = 1"], lines)
    imports = Spread.of(import_seconds(IMPORT) for _ in range(args.repeats))
    said = f"`{IMPORT}` takes {spread(imports)} s beyond `import torch`."
    print(f"{text}\n\n{said}")
    if args.write:
        page.write("start", f"{page.machine()} {args.repeats} turns.", text, said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
