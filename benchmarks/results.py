# SPDX-License-Identifier: Apache-2.0
"""What the processes measured, put together: ratios, medians, and who agrees."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Iterable, NamedTuple

from .contestants import PLAIN
from .worker import OPERATIONS, Job

# Of unshuffled runs. Rounding grows with each update: initial weights that differ by 1
# in 10^7 change W1's loss by 0.02% in the first epoch, 0.6% in the third.
FIRST_LOSS_TOLERANCE = 5e-3  # relative, of the first epoch's loss
LOSS_TOLERANCE = 5e-2  # of later ones, and of the evaluation's
ACCURACY_TOLERANCE = 5e-3  # or this many samples, if that is more:
SAMPLES_TOLERANCE = 4


class Spread(NamedTuple):
    """Of some repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Median, least and greatest."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])


@dataclass(frozen=True)
class Row:
    """A contestant in one operation of a workload.

    Attributes:
        workload: Its name.
        operation: Of `OPERATIONS`.
        contestant: Its name.
        speed: Plain loop's CPU seconds over the contestant's, repeat by repeat; above
            1 is faster.
        wall_speed: The same of the clock's seconds.
        cpu_seconds: Of one pass over the samples.
        set_up_seconds: CPU seconds of its imports (beyond torch) and constructor.
        first_seconds: CPU seconds of the first pass beyond those of a later one.
        memory: Peak memory of the process over the plain loop's.
    """

    workload: str
    operation: str
    contestant: str
    speed: Spread
    wall_speed: Spread
    cpu_seconds: Spread
    set_up_seconds: float
    first_seconds: float
    memory: Spread


@dataclass(frozen=True)
class Absence:
    """A contestant without figures, and why."""

    workload: str
    operation: str
    contestant: str
    reason: str


class Measured:
    """The results of all processes, as they come: those of repeats in their order.

    Args:
        baseline: The contestant that speeds are relative to.
    """

    def __init__(self, baseline: str = PLAIN) -> None:
        self._baseline = baseline
        self._results: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)

    def add(self, job: Job, result: dict[str, Any]) -> None:
        """Keep what a process measured."""
        self._results[job.workload, job.contestant].append(result)

    def rows(self) -> list[Row]:
        """All figures, by workload, operation, contestant."""
        return [row for row in self._each() if isinstance(row, Row)]

    def absences(self) -> list[Absence]:
        """What has no figures."""
        return [row for row in self._each() if isinstance(row, Absence)]

    def _each(self) -> Iterable[Row | Absence]:
        for workload in dict.fromkeys(name for name, _ in self._results):
            for operation in OPERATIONS:
                for (name, contestant), results in self._results.items():
                    if name == workload:
                        yield from self._row(workload, operation, contestant, results)

    def _row(
        self,
        workload: str,
        operation: str,
        contestant: str,
        results: list[dict[str, Any]],
    ) -> Iterable[Row | Absence]:
        plain = self._results[workload, self._baseline]
        pairs = []
        for mine, other in zip(results, plain):
            if "failed" in mine:
                yield Absence(workload, operation, contestant, mine["failed"])
                return
            timed = mine["operations"].get(operation)
            if timed is None:  # wasn't asked for
                return
            if "unavailable" in timed:
                yield Absence(workload, operation, contestant, timed["unavailable"])
                return
            memory = mine["peak_bytes"] / other["peak_bytes"]
            pairs.append((timed, other["operations"][operation], memory))
        extra = [_first(timed) for timed, _, _ in pairs]
        yield Row(
            workload,
            operation,
            contestant,
            _ratios(pairs, "cpu"),
            _ratios(pairs, "wall"),
            Spread.of(timed["measured"]["cpu"] for timed, _, _ in pairs),
            statistics.median(result["set_up"]["cpu"] for result in results),
            statistics.median(extra),
            Spread.of(memory for _, _, memory in pairs),
        )


def _first(timed: dict[str, Any]) -> float:
    """What the first pass took more; it may measure as a little less than nothing."""
    return max(0.0, timed["first"]["cpu"] - timed["measured"]["cpu"])


def _ratios(pairs: list[tuple[Any, Any, float]], clock: str) -> Spread:
    return Spread.of(
        plain["measured"][clock] / mine["measured"][clock] for mine, plain, _ in pairs
    )


# Who agrees ---------------------------------------------------------------------------


def differences(mine: dict[str, Any], plain: dict[str, Any]) -> dict[str, float]:
    """How far figures are from the plain loop's, both unshuffled.

    Args:
        mine: `figures` of a contestant.
        plain: Those of the plain loop.

    Returns:
        `first loss`: the relative difference of the first epoch's training loss;
        `loss`: the largest of the later ones and the evaluation's; `accuracy`: the
        largest absolute one; `scores`: the largest absolute one of the first
        predictions. Only what both have; infinity for NaN.
    """
    found: dict[str, float] = {}

    def note(name: str, value: float) -> None:
        found[name] = max(found.get(name, 0.0), math.inf if value != value else value)

    pairs = list(zip(mine.get("train", []), plain.get("train", [])))
    if "evaluate" in mine and "evaluate" in plain:
        pairs.append((mine["evaluate"], plain["evaluate"]))
    is_trained = bool(mine.get("train") and plain.get("train"))
    for number, ((loss, accuracy), (plain_loss, plain_accuracy)) in enumerate(pairs):
        name = "first loss" if is_trained and number == 0 else "loss"
        note(name, abs(loss - plain_loss) / abs(plain_loss))
        note("accuracy", abs(accuracy - plain_accuracy))
    if "predict" in mine and "predict" in plain:
        for row, plain_row in zip(mine["predict"][1:], plain["predict"][1:]):
            for score, plain_score in zip(row, plain_row):
                note("scores", abs(score - plain_score))
    return found


def complaints(
    mine: dict[str, Any],
    plain: dict[str, Any],
    epochs: int,
    samples: int,
    factor: float = 1.0,
) -> list[str]:
    """What a contestant did less than the plain loop, or otherwise; empty if nothing.

    Args:
        mine: `figures` of a contestant, unshuffled.
        plain: Those of the plain loop.
        epochs: That were to be trained.
        samples: Of an epoch or evaluation, whichever has fewer.
        factor: On all tolerances, for who computes in fewer bits.
    """
    said = []
    losses = [loss for loss, _ in mine.get("train", [])]
    if "train" in mine:
        if len(losses) != epochs:
            said.append(f"{len(losses)} epochs instead of {epochs}")
        elif not losses[-1] < losses[0]:
            said.append(f"the loss went from {losses[0]:.4g} to {losses[-1]:.4g}")
    far = differences(mine, plain)
    for name, tolerance in (
        ("first loss", FIRST_LOSS_TOLERANCE),
        ("loss", LOSS_TOLERANCE),
        ("accuracy", max(ACCURACY_TOLERANCE, SAMPLES_TOLERANCE / samples)),
    ):
        if far.get(name, 0.0) > factor * tolerance:
            said.append(f"{name} differs by {far[name]:.2g}")
    if "predict" in mine and mine["predict"][0] != plain["predict"][0]:
        said.append(f"{mine['predict'][0]} rows instead of {plain['predict'][0]}")
    return said
