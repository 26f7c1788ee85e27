# SPDX-License-Identifier: Apache-2.0
"""How long the first step takes, beside the plain loop's: imports, tracing, and all.

    python -m benchmarks.start --repeats 5

A start is what a process does from its imports (beyond torch) to the end of its first
weight update. Contestants take turns, each in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any, Iterable, NamedTuple, Sequence

from . import page, workloads
from .contestants import PLAIN
from .results import Spread
from .runs import Runner, caches, import_seconds, interleaved, stop_in_order
from .tables import rounded, spread, table
from .worker import Job

OURS = "ipufit-default"
NETWORKS = ("resnet50", "encoder12")
_NAMES = "from ipufit import IPUConfig, IPUModel"


class Start(NamedTuple):
    """Seconds of one process: of processors, or of the clock.

    Attributes:
        set_up: Imports beyond torch, the model, `compile`.
        first: The first pass, tracing and compiling included.
        later: A later pass over as many samples.
    """

    set_up: float
    first: float
    later: float

    @property
    def whole(self) -> float:
        """Until the first pass is done."""
        return self.set_up + self.first


def start_of(result: dict[str, Any], clock: str = "cpu") -> Start:
    """The start that a process measured.

    Args:
        result: What `benchmarks.worker.measure` gives.
        clock: `"cpu"` or `"wall"`.
    """
    timed = result["operations"]["train"]
    return Start(
        result["set_up"][clock], timed["first"][clock], timed["measured"][clock]
    )


def ratios(mine: Sequence[Start], plain: Sequence[Start], part: str) -> Spread:
    """A part of starts over the plain loop's of the same turn; below 1 is faster."""
    return Spread.of(
        getattr(one, part) / getattr(other, part) for one, other in zip(mine, plain)
    )


def row(name: str, mine: Sequence[Start], plain: Sequence[Start]) -> dict[str, Any]:
    """A network in `docs/benchmarks.json`; CPU seconds are medians."""
    entry: dict[str, Any] = {"workload": name}
    for title, starts in (("plain", plain), ("ipufit", mine)):
        for part in ("set_up", "first", "later"):
            middle = statistics.median(getattr(one, part) for one in starts)
            entry[f"{title}_{part}_seconds"] = round(middle, 2)
    for part in ("first", "whole"):
        entry[f"{part}_ratio"] = rounded(ratios(mine, plain, part))
    return entry


def report(rows: Iterable[dict[str, Any]]) -> str:
    """Tables of the rows, one for each kind."""
    rows = list(rows)
    parts = []
    starts = [one for one in rows if "whole_ratio" in one]
    if starts:
        heading = ["CPU seconds", "plain loop: set up", "first step", "later"]
        heading += ["ipufit: set up", "first step", "later"]
        heading += ["first step, plain loop = 1", "with set up"]
        lines = []
        for one in starts:
            keys = [
                f"{who}_{part}_seconds"
                for who in ("plain", "ipufit")
                for part in ("set_up", "first", "later")
            ]
            cells = [f"{one[key]:.2f}" for key in keys]
            cells += [
                spread(Spread(*one[f"{part}_ratio"])) for part in ("first", "whole")
            ]
            lines.append([one["workload"], *cells])
        parts.append(table(heading, lines))
    imports = [one for one in rows if "import_seconds" in one]
    if imports:
        lines = [
            [f"`{one['statement']}`", spread(Spread(*one["import_seconds"]))]
            for one in imports
        ]
        parts.append(table(["import beyond torch", "CPU s"], lines))
    return "\n\n".join(parts)


def measure(
    runner: Runner, names: Sequence[str], contestants: Sequence[str], args: Any
) -> dict[str, dict[str, list[Start]]]:
    """Starts by workload and contestant, turn by turn.

    Raises:
        RuntimeError: A process failed.
    """
    found: dict[str, dict[str, list[Start]]] = {}
    for name in names:
        jobs = [
            Job(name, one, ("train",), args.threads, data_dir=args.data_dir)
            for one in contestants
        ]
        for job, result in interleaved(runner, jobs, args.repeats):
            if "first" not in result.get("operations", {}).get("train", {}):
                raise RuntimeError(f"{name}, {job.contestant}: {result}")
            starts = found.setdefault(name, {}).setdefault(job.contestant, [])
            starts.append(start_of(result))
    return found


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The switches."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--networks", nargs="*", default=list(NETWORKS), help="workloads to start")
    add("--repeats", type=int, default=5, help="turns, at least 2")
    add("--threads", type=int, default=1, help="of torch")
    add("--data-dir", help="where MNIST may be")
    add("--journal", type=Path, help="keep results here; go on if some are there")
    add("--write", action="store_true", help="put the results into docs/")
    args = parser.parse_args(arguments)
    if args.repeats < 2:
        parser.error("--repeats must be 2 or more: the first start is apart.")
    for name in args.networks:
        try:
            workloads.find(name)
        except ValueError as error:
            parser.error(str(error))
    return args


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    args = parse_arguments(arguments)
    with caches(args.journal) as folder:
        runner = Runner(folder, args.journal, _report)
        starts = measure(runner, args.networks, (PLAIN, OURS), args)
        rows = [row(name, one[OURS], one[PLAIN]) for name, one in starts.items()]
        for statement in ("import ipufit", _NAMES):
            seconds = [import_seconds(runner, statement) for _ in range(args.repeats)]
            taken = rounded(Spread.of(seconds))
            rows.append({"statement": statement, "import_seconds": taken})
    text = report(rows)
    print(text)
    if args.write:
        settings = f"{page.machine()} {args.repeats} turns each, threads: "
        page.write("start", f"{settings}{args.threads}.", [text], rows)
    return 0


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    stop_in_order()
    sys.exit(main())
