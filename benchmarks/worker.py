# SPDX-License-Identifier: Apache-2.0
"""One contestant on one workload, measured in this process alone.

    python -m benchmarks.worker JOB RESULT

reads the job, `Job` as JSON, and writes what was measured. `benchmarks.runs` starts it.
Each operation is done once before, so that compilation and what is done at the first
use don't count; what that took is kept beside.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

OPERATIONS = ("train", "evaluate", "predict")
_ROWS_KEPT = 8  # of the predictions


@dataclass(frozen=True)
class Job:
    """What a process is to do.

    Attributes:
        workload: Its name.
        contestant: Its name.
        operations: Of `OPERATIONS`, in this order.
        threads: Of torch.
        shuffle: Whether to shuffle; without, contestants must agree.
        data_dir: Where MNIST may be.
    """

    workload: str
    contestant: str
    operations: tuple[str, ...] = OPERATIONS
    threads: int = 1
    shuffle: bool = True
    data_dir: str | None = None


@dataclass(frozen=True)
class Times:
    """Seconds since some moment: of the processors, and of the clock."""

    cpu: float
    wall: float

    @classmethod
    def now(cls) -> Times:
        """Of this process and of the children it has waited for (compilers)."""
        used = [
            resource.getrusage(who)
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        cpu = sum(one.ru_utime + one.ru_stime for one in used)
        return cls(cpu, time.perf_counter())

    def __sub__(self, other: Times) -> Times:
        return Times(self.cpu - other.cpu, self.wall - other.wall)


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(job: Job) -> dict[str, Any]:
    """Do a job.

    Returns:
        `operations`: for each, seconds of the `first` pass and of each `measured` one
        (`cpu` and `wall`), or `unavailable` with the reason. `figures`: losses and
        accuracies of all training epochs, those of the evaluation, and the first rows
        predicted. `set_up`: seconds of its imports and constructor. `peak_bytes`:
        after training.
    """
    import torch

    from .contestants import CONTESTANTS
    from .contestants.base import Task, UnavailableError
    from .workloads import find

    torch.set_num_threads(job.threads)
    workload = find(job.workload)
    data_dir = None if job.data_dir is None else Path(job.data_dir)
    task = Task(
        workload,
        workload.make_network(),
        workload.train_data(data_dir),
        workload.test_data(data_dir),
        job.shuffle,
    )
    result: dict[str, Any] = {"operations": {}, "figures": {}}
    start = Times.now()
    try:
        contestant = CONTESTANTS[job.contestant].load()(task)
    except UnavailableError as error:
        reason = {"unavailable": str(error)}
        return {**result, "operations": dict.fromkeys(job.operations, reason)}
    result["set_up"] = dataclasses.asdict(Times.now() - start)

    def train(epochs: int) -> None:
        figures = result["figures"].setdefault("train", [])
        figures += [list(epoch) for epoch in contestant.train(epochs)]

    def evaluate(passes: int) -> None:
        for _ in range(passes):
            result["figures"]["evaluate"] = list(contestant.evaluate())

    def predict(passes: int) -> None:
        for _ in range(passes):
            scores = contestant.predict()
        result["figures"]["predict"] = [len(scores)]
        result["figures"]["predict"] += scores[:_ROWS_KEPT].tolist()

    actions = {
        "train": (train, workload.epochs),
        "evaluate": (evaluate, workload.passes),
        "predict": (predict, workload.passes),
    }
    for name in job.operations:
        try:
            result["operations"][name] = _timed(*actions[name])
        except UnavailableError as error:
            result["operations"][name] = {"unavailable": str(error)}
        if name == "train":
            result["peak_bytes"] = peak_bytes()
    result.setdefault("peak_bytes", peak_bytes())
    return result


def _timed(action: Callable[[int], None], passes: int) -> dict[str, Any]:
    start = Times.now()
    action(1)
    warm = Times.now()
    action(passes)
    spent = Times.now() - warm
    return {
        "first": dataclasses.asdict(warm - start),
        "measured": {"cpu": spent.cpu / passes, "wall": spent.wall / passes},
    }


def main(arguments: list[str]) -> None:
    """Read the job, write the result."""
    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    job["operations"] = tuple(job["operations"])
    result = measure(Job(**job))
    Path(arguments[1]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # threads that somebody left behind
