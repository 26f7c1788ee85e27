# SPDX-License-Identifier: Apache-2.0
"""How speed and memory change with the size of everything.

    python -m benchmarks.scaling --repeats 3

Trains a small MLP by ipufit on its emulator, where overhead is most of the cost, and
changes one thing at a time: samples of the dataset, epochs, device iterations (D),
gradient accumulation (G), replicas (R), width, workers. Each setting runs in a process
of its own, in turns. If cost grows linearly, microseconds per sample are the same for
every number of samples and epochs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from pathlib import Path
from typing import Any, Iterable, NamedTuple

from . import page, pictures
from .point import Point
from .results import Spread
from .runs import Runner, caches, stop_in_order
from .tables import rounded, spread, table

_MICRO, _MEGA = 1e6, 1e6

AXES: dict[str, tuple[str, list[Any]]] = {
    "samples": ("samples of the dataset", [2**k for k in range(10, 19)]),
    "epochs": ("epochs", [1, 2, 4, 8, 16, 32]),
    "device_iterations": ("device iterations, D", [1, 2, 4, 8, 16, 32, 64]),
    "accumulation": ("gradient accumulation, G", [1, 2, 4, 8, 16]),
    "replicas": ("replicas, R", [1, 2, 4, 8]),
    "width": ("width of the hidden layer", [32, 64, 128, 256, 512, 1024]),
    "workers": ("workers of a map-style dataset", [0, 1, 2]),
}


class Cost(NamedTuple):
    """Of a setting, over the repeats.

    Attributes:
        point: The setting.
        sample_us: CPU microseconds per sample, workers' included.
        call_us: Those per call.
        wall_us: Of the clock, per sample.
        memory_mb: Peak, beyond what was there before `fit`.
    """

    point: Point
    sample_us: Spread
    call_us: Spread
    wall_us: Spread
    memory_mb: Spread


def points(axis: str, *, quick: bool = False) -> list[Point]:
    """The settings of an axis; the dataset has whole calls in all of them."""
    values = AXES[axis][1]
    if quick:
        values = values[:2]
    found = []
    for value in values:
        point = dataclasses.replace(Point(), **{axis: value})
        if axis == "samples":  # short ones often enough to be measured
            epochs = max(1, 2**16 // point.samples)
            point = dataclasses.replace(point, epochs=epochs)
        found.append(point)
    return found


def cost(point: Point, results: Iterable[dict[str, float]]) -> Cost:
    """What repeats of a setting come to."""
    results = list(results)
    samples = point.samples * point.epochs
    calls = point.samples // point.samples_per_call * point.epochs
    return Cost(
        point,
        Spread.of(_MICRO * one["cpu"] / samples for one in results),
        Spread.of(_MICRO * one["cpu"] / calls for one in results),
        Spread.of(_MICRO * one["wall"] / samples for one in results),
        Spread.of((one["peak_bytes"] - one["start_bytes"]) / _MEGA for one in results),
    )


def exponent(costs: list[Cost]) -> float:
    """The slope of log cost over log samples, by least squares; 1 is linear.

    Cost is that of an epoch; only datasets of at least 16 calls count, so that what a
    `fit` costs once doesn't.
    """
    large = [one for one in costs if one.point.samples >= 16 * _call(one)] or costs
    x = [math.log(one.point.samples) for one in large]
    y = [math.log(one.point.samples * one.sample_us.median) for one in large]
    middle, level = statistics.mean(x), statistics.mean(y)
    above = sum((a - middle) * (b - level) for a, b in zip(x, y))
    return above / sum((a - middle) ** 2 for a in x)


def _call(one: Cost) -> int:
    return one.point.samples_per_call


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The switches."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--axes", nargs="+", default=list(AXES), choices=list(AXES))
    add("--repeats", type=int, default=3, help="turns of each setting")
    add("--quick", action="store_true", help="two settings of each axis, to try it")
    add("--journal", type=Path, help="keep results here; go on if some are there")
    add("--write", action="store_true", help="put the results into docs/")
    args = parser.parse_args(arguments)
    if args.write:
        pictures.refuse_without_matplotlib(parser)
    return args


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    args = parse_arguments(arguments)
    measured = {}
    with caches(args.journal) as folder:
        runner = Runner(folder, args.journal, _report)
        for axis in args.axes:
            measured[axis] = _costs(runner, axis, args.repeats, quick=args.quick)
            print(f"\n{_table(axis, measured[axis])}", flush=True)
    summary = ""
    if "samples" in measured:
        slope = exponent(measured["samples"])
        summary = f"Cost grows as the number of samples to the power of {slope:.3f}."
        print(f"\n{summary}")
    if args.write:
        tables = [_table(axis, costs) for axis, costs in measured.items()]
        rows = [_row(axis, one) for axis in measured for one in measured[axis]]
        page.write("scaling", page.machine(), [summary, *tables], rows)
    return 0


def _costs(runner: Runner, axis: str, repeats: int, *, quick: bool) -> list[Cost]:
    settings = points(axis, quick=quick)
    results: dict[Point, list[dict[str, float]]] = {point: [] for point in settings}
    for repeat in range(repeats):
        for point in settings:
            title = f"{axis} {getattr(point, axis)}"
            asked = dataclasses.asdict(point)
            answer = runner.call("benchmarks.point", asked, repeat, title)
            if "failed" in answer:
                raise RuntimeError(f"{title}: {answer['failed']}")
            results[point].append(answer)
    return [cost(point, answers) for point, answers in results.items()]


def _table(axis: str, costs: list[Cost]) -> str:
    return table(
        [
            AXES[axis][0],
            "samples/s",
            "CPU us/sample",
            "CPU us/call",
            "wall us/sample",
            "memory MB",
        ],
        [
            [
                str(getattr(one.point, axis)),
                f"{_MICRO / one.sample_us.median:.0f}",
                spread(one.sample_us),
                spread(one.call_us, 0),
                spread(one.wall_us),
                spread(one.memory_mb, 1),
            ]
            for one in costs
        ],
    )


def _row(axis: str, one: Cost) -> dict[str, Any]:
    """A setting in `docs/benchmarks.json`; lists are median, least and greatest."""
    return {
        "axis": axis,
        "value": getattr(one.point, axis),
        "cpu_us_per_sample": rounded(one.sample_us),
        "cpu_us_per_call": rounded(one.call_us, 0),
        "wall_us_per_sample": rounded(one.wall_us),
        "memory_mb": rounded(one.memory_mb, 1),
    }


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    stop_in_order()
    sys.exit(main())
