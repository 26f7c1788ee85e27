# SPDX-License-Identifier: Apache-2.0
"""Writers that are killed; run by `test_killed_writers.py` in a process of its own.

It forks, so that torch is imported once, and does so before torch has any threads.

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

from ipufit.checkpoint import CheckpointStore
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


def main(where, count):
    random.seed(5)
    sys.stdout.write(json.dumps(random_moments(where, count)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
