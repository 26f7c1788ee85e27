# SPDX-License-Identifier: Apache-2.0
"""Several processes on one host: ipufit beside DistributedDataParallel.

    python -m benchmarks.distributed --turns 5

All share the batch of an update, so that more processes do the same work. Processes
stay and take turns. Ratios are those of the clock's time in the same turn: medians and
ranges; above 1 is faster. First all train once unshuffled, and must report the loss of
a plain loop. It also measures the bytes that processes send, and what their agreement
costs where they exchange no gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections import defaultdict
from functools import partial
from typing import Any, Iterator, NamedTuple

from . import page, pictures
from .crews import Crew
from .results import FIRST_LOSS_TOLERANCE, Spread
from .runs import stop_in_order
from .tables import spread, table
from .together import WORKLOADS, Spent, Worker, find

_MICRO, _MILLI = 1e6, 1e3

TITLES = {
    "ipufit": "ipufit",
    "ipufit-d1": "ipufit, one update per call",
    "loop": "DDP, fast",
    "usual": "DDP, usual",
}
BASELINE = "loop"

KINDS = {
    "silent": "call of `fit`",
    "heard": "call of `fit` with a callback that hears it",
    "evaluate": "call of `evaluate`",
    "end": "end of an epoch",
}
_CALLS, _EPOCHS = 100, 20


class Layout(NamedTuple):
    """How a host's cores are used."""

    processes: int
    threads: int

    def __str__(self) -> str:
        plural = "es" if self.processes > 1 else ""
        threads = f", {self.threads} threads" if self.threads > 1 else ""
        return f"{self.processes} process{plural}{threads}"


class Turn(NamedTuple):
    """What a contestant has spent in a turn, over all processes.

    Attributes:
        wall: Seconds of the slowest process.
        cpu: Seconds of all processes.
        sent: Bytes that a process sent, on average; None where nobody counts them.
        loss: Of its epoch; None if there was none.
    """

    wall: float
    cpu: float
    sent: float | None
    loss: float | None

    @classmethod
    def of(cls, all_spent: list[Spent]) -> Turn:
        """What the processes of a crew have answered."""
        sent = [one.sent for one in all_spent if one.sent is not None]
        figures = all_spent[0].figures
        return cls(
            max(one.wall for one in all_spent),
            sum(one.cpu for one in all_spent),
            sum(sent) / len(sent) if sent else None,
            figures[0].loss if figures else None,
        )


class Measured:
    """The turns of all contestants, by workload and layout."""

    def __init__(self) -> None:
        self.turns: dict[tuple[str, Layout, str], list[Turn]] = defaultdict(list)

    def ratios(
        self, workload: str, layout: Layout, to: str, clock: str = "wall"
    ) -> Spread:
        """How much faster ipufit is than another contestant, turn by turn."""
        mine, others = (self.turns[workload, layout, one] for one in ("ipufit", to))
        return Spread.of(
            getattr(other, clock) / getattr(one, clock)
            for one, other in zip(mine, others)
        )

    def best(self, workload: str, layout: Layout, name: str) -> float:
        """Seconds of the shortest turn."""
        return min(turn.wall for turn in self.turns[workload, layout, name])


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The switches."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    add("--processes", nargs="+", type=int, default=[1, 2, 4], metavar="P")
    add("--turns", type=int, default=5, help="of each contestant")
    add("--minutes", type=float, default=5.0, help="after which no turn begins")
    add("--quick", action="store_true", help="few samples and one turn, to try it")
    add("--write", action="store_true", help="put the results into docs/")
    args = parser.parse_args(arguments)
    if args.write:
        pictures.refuse_without_matplotlib(parser)
    if args.quick:
        args.turns = 1
    return args


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status: 1 if a contestant does other work."""
    args = parse_arguments(arguments)
    counts = sorted({1, *args.processes})
    layouts = [Layout(1, count) for count in counts]
    layouts += [Layout(count, 1) for count in counts if count > 1]
    measured = Measured()
    began, share = time.monotonic(), 60 * args.minutes / (1 + len(args.workloads))
    with crews(layouts, quick=args.quick) as made:
        unlike = sum(check(made, name) for name in args.workloads)
        parts = []
        for number, name in enumerate(args.workloads, start=1):
            until = began + number * share
            measure(made, name, args.turns, measured, until)
            parts += [_speeds(measured, name, layouts, quick=args.quick)]
            print(f"\n{parts[-1]}", flush=True)
        parts += [_bytes(measured, args.workloads, layouts, quick=args.quick)]
        until = began + 60 * args.minutes
        parts += [_costs(made, args.turns, until, quick=args.quick)]
        parts += [_verdict(measured)]
    print("\n" + "\n\n".join(parts[-3:]), flush=True)
    if args.write:
        settings = f"{page.machine()} At most {args.turns} turns."
        rows = _rows(measured, args.workloads, layouts, quick=args.quick)
        page.write("distributed", settings, parts, rows)
    return 1 if unlike else 0


@contextlib.contextmanager
def crews(layouts: list[Layout], *, quick: bool) -> Iterator[dict[Layout, Crew]]:
    """The processes of all layouts; they wait while others take their turn."""
    made: dict[Layout, Crew] = {}
    try:
        for layout in layouts:
            made[layout] = Crew(partial(Worker, quick=quick), *layout)
        yield made
    finally:
        for crew in made.values():
            crew.dismiss()


# Measuring ----------------------------------------------------------------------------


def check(made: dict[Layout, Crew], workload: str) -> int:
    """Compare the loss of an unshuffled epoch with that of a plain loop.

    Returns:
        How many differ.
    """
    unlike = 0
    plain = Turn.of(made[Layout(1, 1)].ask("train", workload, BASELINE, 1, False)).loss
    for layout, crew in made.items():
        for name in TITLES:
            if (layout, name) == (Layout(1, 1), BASELINE):
                continue
            loss = Turn.of(crew.ask("train", workload, name, 1, False)).loss
            difference = abs(loss - plain) / plain
            if not difference <= FIRST_LOSS_TOLERANCE:
                unlike += 1
                print(f"{workload}, {layout}, {TITLES[name]}: loss {loss} != {plain}")
    return unlike


def measure(
    made: dict[Layout, Crew],
    workload: str,
    turns: int,
    measured: Measured,
    until: float = math.inf,
) -> None:
    """Have all contestants take turns; every other time in the opposite order.

    Args:
        made: The processes.
        workload: Its name.
        turns: Of each contestant.
        measured: Gets the turns.
        until: When no further turn begins, of `time.monotonic`; one there is always.
    """
    for turn in range(turns):
        if turn and time.monotonic() > until:
            return
        for layout, crew in made.items():
            names = list(TITLES)
            for name in names if turn % 2 else reversed(names):
                epochs = WORKLOADS[workload].epochs
                spent = Turn.of(crew.ask("train", workload, name, epochs, True))
                measured.turns[workload, layout, name].append(spent)


def measure_calls(
    made: dict[Layout, Crew], turns: int, until: float, *, quick: bool
) -> dict[tuple[str, Layout], list[Turn]]:
    """What calls and ends of epochs take, one of each, turn by turn."""
    found: dict[tuple[str, Layout], list[Turn]] = defaultdict(list)
    calls, epochs = (2, 2) if quick else (_CALLS, _EPOCHS)
    for turn in range(turns):
        if turn and time.monotonic() > until:
            break
        for layout, crew in made.items():
            if layout.threads > 1:
                continue
            for kind in KINDS:
                asked = (kind, calls, 1) if kind != "end" else (kind, 1, epochs)
                number = asked[1] * asked[2]
                spent = Turn.of(crew.ask("calls", *asked))
                each = spent.cpu / layout.processes
                found[kind, layout].append(
                    Turn(spent.wall / number, each / number, None, None)
                )
    return found


# Reporting ----------------------------------------------------------------------------


def _rows(
    measured: Measured, workloads: list[str], layouts: list[Layout], *, quick: bool
) -> list[dict[str, Any]]:
    """The speeds in `docs/benchmarks.json`."""
    return [
        {
            "workload": workload,
            "processes": layout.processes,
            "threads": layout.threads,
            "samples_per_second": {
                name: round(value)
                for name, value in _throughputs(
                    measured, workload, layout, quick=quick
                ).items()
            },
        }
        for workload in workloads
        for layout in layouts
    ]


def _throughputs(
    measured: Measured, workload: str, layout: Layout, *, quick: bool
) -> dict[str, float]:
    """Samples per second of each contestant, by the clock."""
    found = find(workload, quick=quick)
    samples = found.num_train * found.epochs
    turns = {name: measured.turns[workload, layout, name] for name in TITLES}
    return {
        name: samples / Spread.of(turn.wall for turn in each).median
        for name, each in turns.items()
    }


def _speeds(
    measured: Measured, workload: str, layouts: list[Layout], *, quick: bool
) -> str:
    rows = []
    for layout in layouts:
        speeds = _throughputs(measured, workload, layout, quick=quick)
        row = [str(layout), *(f"{speed:.0f}" for speed in speeds.values())]
        row.append(spread(measured.ratios(workload, layout, BASELINE)))
        best = [measured.best(workload, layout, one) for one in (BASELINE, "ipufit")]
        row.append(f"{best[0] / best[1]:.2f}")
        row.append(spread(measured.ratios(workload, layout, BASELINE, "cpu")))
        row.append(spread(measured.ratios(workload, layout, "usual")))
        rows.append(row)
    heading = [f"{WORKLOADS[workload].title}: samples/s", *TITLES.values()]
    ratios = ["ipufit to fast", "best turns", "CPU time", "ipufit to usual"]
    return table([*heading, *ratios], rows)


def _bytes(
    measured: Measured, workloads: list[str], layouts: list[Layout], *, quick: bool
) -> str:
    rows = []
    for workload in workloads:
        found = find(workload, quick=quick)
        parameters = found.make_network().parameters()
        size = sum(one.numel() * one.element_size() for one in parameters)
        updates = found.num_train // found.batch_size * found.epochs
        for layout in layouts:
            count = layout.processes
            if count == 1:
                continue
            ring = 2 * (count - 1) / count * size
            row = [workload, str(count), f"{size}", f"{ring:.0f}"]
            for name in ("ipufit", "loop"):
                sent = measured.turns[workload, layout, name][-1].sent
                row.append("-" if sent is None else f"{sent / updates:.0f}")
            rows.append(row)
    heading = ["bytes of an update", "processes", "model", "ring", "ipufit", "DDP"]
    return table(heading, rows)


def _costs(made: dict[Layout, Crew], turns: int, until: float, *, quick: bool) -> str:
    found = measure_calls(made, turns, until, quick=quick)
    layouts = list(dict.fromkeys(layout for _, layout in found))
    rows = []
    for kind, title in KINDS.items():
        row = [title]
        for layout in layouts:
            each = found[kind, layout]
            row.append(spread(Spread.of(_MICRO * one.cpu for one in each), 0))
        rows.append(row)
    heading = ["without gradients, CPU us of a process", *map(str, layouts)]
    return table(heading, rows)


def _verdict(measured: Measured) -> str:
    several = {
        (workload, layout)
        for workload, layout, _ in measured.turns
        if layout.processes > 1
    }
    slower = sorted(
        (ratio, workload, layout)
        for workload, layout in several
        if (ratio := measured.ratios(workload, layout, BASELINE).median) < 1
    )
    text = (
        f"ipufit is as fast as the fast loop with DDP in {len(several) - len(slower)}"
    )
    text += f" of {len(several)}"
    cases = ", ".join(f"{w} with {at} ({ratio:.2f})" for ratio, w, at in slower)
    return f"{text}; slower: {cases}." if slower else f"{text}."


if __name__ == "__main__":
    stop_in_order()
    sys.exit(main())
