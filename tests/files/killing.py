# SPDX-License-Identifier: Apache-2.0
"""Writers that are killed; run by `test_killed_writers.py` in a process of its own.

It forks, so that torch is imported once, and does so before torch has any threads.
Where every step is tried, nothing is really synced: what the kernel has outlives a
killed process, and it would take long.

    python -m tests.files.killing DIRECTORY COUNT
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from unittest import mock

from ipufit.checkpoint import CheckpointStore, load_checkpoint, write_checkpoint
from tests.files.faults import at_step, fork_and_wait, killed
from tests.files.samples import names, number_of, sample

ENOUGH = 5


def random_moments(directory, count):
    """Kill a writer that saves without end, so often and until it has saved some."""
    store = CheckpointStore(directory, keep_last=2, keep_best=1)
    began = time.monotonic()
    store.save(sample(0), epoch=0, update=0, metric=1.0)
    longest = 5 * (time.monotonic() - began)
    numbers, most = [0], 0
    while len(numbers) <= count or numbers[-1] <= ENOUGH:
        child = os.fork()
        if child == 0:
            save_forever(directory)
        time.sleep(random.uniform(0.0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        _, checkpoint = store.load_latest()
        numbers.append(number_of(checkpoint))
        if len(numbers) > count:  # the machine may have become slower
            longest *= 1.5
        most = max(most, len(names(directory)))
    saved = numbers[-1] + 1
    store.save(sample(saved), epoch=0, update=saved, metric=float(saved))
    return {"numbers": numbers, "most": most, "left": names(directory)}


def save_forever(directory):
    try:
        store = CheckpointStore(directory, keep_last=2, keep_best=1)
        start = store.load_latest()[1].state["update"] + 1
        for update in itertools.count(start):
            metric = float(update % 7)
            store.save(sample(update), epoch=0, update=update, metric=metric)
    finally:
        os._exit(1)


def store_steps(directory):
    """Kill `CheckpointStore.save` before each of its steps."""
    store = CheckpointStore(directory, keep_last=1)
    store.save(sample(0), epoch=0, update=0)
    numbers = []
    for step in itertools.count():
        number = number_of(store.load_latest()[1])

        def save(step=step, number=number):
            with at_step(step, killed):
                store.save(sample(number + 1), epoch=0, update=number + 1)

        done = fork_and_wait(save)
        numbers.append(number_of(store.load_latest()[1]) - number)
        store.save(sample(step + 1000), epoch=0, update=step + 1000)
        if len(names(directory)) != 1:
            raise AssertionError(f"step {step} left {names(directory)}")
        if done:
            return {"gains": numbers, "left": names(directory)}
    return None


def path_steps(directory):
    """Kill `write_checkpoint` over an old checkpoint before each of its steps."""
    target = directory / "saved"
    gains = []
    for step in itertools.count():
        write_checkpoint(target, sample(step))
        if names(directory) != ["saved"]:
            raise AssertionError(f"step {step - 1} left {names(directory)}")

        def write(step=step):
            with at_step(step, killed):
                write_checkpoint(target, sample(step + 1))

        done = fork_and_wait(write)
        gains.append(number_of(load_checkpoint(target)) - step)
        if done:
            return {"gains": gains, "left": names(directory)}
    return None


def main(where, count):
    random.seed(5)
    for name in ("random", "store", "path"):
        (where / name).mkdir()
    seen = {"random": random_moments(where / "random", count)}
    with mock.patch.object(os, "fsync"):
        seen["store"] = store_steps(where / "store")
        seen["path"] = path_steps(where / "path")
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
