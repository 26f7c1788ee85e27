# SPDX-License-Identifier: Apache-2.0
"""Does a training process that is killed again and again lose anything?

A small run with all that could go wrong (dropout, shuffling, noise from torch's random
numbers, averaged weights, a schedule, early stopping, a backup every few updates) is
killed with SIGKILL at random moments and begun again by the same function, until it
ends by itself:

    python -m benchmarks.kill --times 200

What it leaves must be what a run that nobody killed leaves, byte by byte: weights,
optimiser, averages, History, and the last checkpoint with the state of callbacks and
random numbers. Once a checkpoint was written, each start must find one that is whole,
none older than what the start before found, and go on there. If a run ends and kills
are left, another begins. Prints a summary; fails if any of this doesn't hold.

Torch takes seconds to import, so the processes are forks of this one, which has no
other threads. `--fresh` starts an interpreter for each instead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ipufit import (
    BackupAndRestore,
    Callback,
    CheckpointStore,
    EarlyStopping,
    IPUConfig,
    IPUModel,
    Optimizer,
)

EPOCHS, BATCHES, BATCH_SIZE, SAVE_FREQ = 20, 10, 8, 3
LONGEST_SECONDS = 300.0  # of a run that nobody kills


# The process that trains --------------------------------------------------------------


class NoisyRows(Dataset):
    """Rows with noise, as augmented images have."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self.x[index]
        return row + 0.05 * torch.randn(len(row)), self.y[index]


class Witness(Callback):
    """Writes down where a start goes on."""

    is_saved = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Only before its first call."""
        if not self.path.exists():
            self.path.write_text(str(self.run.updates))


def train(folder: Path) -> None:
    """Begin or go on with the run of a folder, and write what it learnt."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    x = torch.randn(BATCHES * BATCH_SIZE, 6)
    y = x @ torch.randn(6, 1) + 0.5 * torch.randn(len(x), 1)
    network = torch.nn.Sequential(
        torch.nn.Linear(6, 32),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(32, 1),
    )
    model = IPUModel(network, IPUConfig(seed=11))
    model.compile(
        Optimizer("adam", 0.01, ema_momentum=0.9), "mse", lr_schedule="cosine"
    )
    history = model.fit(
        NoisyRows(x, y),
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        verbose=0,
        validation_data=(x[:16], y[:16] + 1.0),
        callbacks=[
            EarlyStopping(patience=2, restore_best_weights=True),
            BackupAndRestore(folder / "backup", SAVE_FREQ, delete_checkpoint=False),
            Witness(folder / "began"),
        ],
    )
    rows = [history.epoch, history.history, model.num_updates]
    (folder / "history.json").write_text(json.dumps(rows))
    model.save(folder / "learnt")


def left_behind(folder: Path) -> dict[str, bytes]:
    """The files of a run that has ended, but for manifests: they count writes."""
    last = CheckpointStore(folder / "backup").latest()
    files = [folder / "history.json", *(folder / "learnt").iterdir(), *last.iterdir()]
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in files
        if file.name != "manifest.json"
    }


class Process:
    """A process that trains: a fork of this one, or a fresh interpreter."""

    def __init__(self, folder: Path, *, is_fresh: bool) -> None:
        if is_fresh:
            command = [sys.executable, "-m", "benchmarks.kill", "--train", str(folder)]
            self.pid = subprocess.Popen(command).pid
            return
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                warnings.simplefilter("error")
                train(folder)
                code = 0
            except BaseException:  # noqa: BLE001 - nothing may reach the parent's code
                traceback.print_exc()
            finally:
                os._exit(code)

    def ends_within(self, seconds: float) -> bool:
        """Wait so long for its end.

        Raises:
            RuntimeError: It has failed.
        """
        until = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                if status:
                    raise RuntimeError("A training process failed; see above.")
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(min(0.001, seconds))

    def kill(self) -> bool:
        """Kill it now; returns whether it was alive."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return True
        if status:
            raise RuntimeError("A training process failed; see above.")
        return False


# The one that kills -------------------------------------------------------------------


@dataclass
class Tally:
    """What happened.

    Attributes:
        times: Kills to make.
        kills: Made.
        during_writes: Of these, while a checkpoint was written or deleted.
        before_first: Of these, before there was any checkpoint.
        starts: Of processes.
        resumed: Of these, with a checkpoint to go on from.
        runs: That ended.
        updates: At which starts went on.
    """

    times: int
    kills: int = 0
    during_writes: int = 0
    before_first: int = 0
    starts: int = 0
    resumed: int = 0
    runs: int = 0
    updates: set[int] = field(default_factory=set)

    def summary(self, seconds: float) -> str:
        """In words, for people."""
        return (
            f"{self.kills} kills in {seconds:.0f} s: {self.during_writes} during a "
            f"write, {self.kills - self.during_writes} not ({self.before_first} before "
            "the first checkpoint)\n"
            f"{self.starts} starts, {self.resumed} of them with a checkpoint; they "
            f"went on at {len(self.updates)} different updates\n"
            f"{self.runs} runs ended, each equal to the uninterrupted one byte by "
            "byte; no start was without a usable checkpoint"
        )


@dataclass(frozen=True)
class Moments:
    """When to kill.

    Attributes:
        start_seconds: From the start of a process to its first call.
        run_seconds: From the start to the end, if it isn't killed.
    """

    start_seconds: float
    run_seconds: float

    def draw(self) -> float:
        """Seconds after a start: late in its beginning, or in its first calls."""
        trained = self.run_seconds - self.start_seconds
        return random.uniform(self.start_seconds / 2, self.start_seconds + trained / 4)


def uninterrupted(folder: Path, *, is_fresh: bool) -> Moments:
    """Run without a kill, and take the time."""
    folder.mkdir()
    began = time.time()
    if not Process(folder, is_fresh=is_fresh).ends_within(LONGEST_SECONDS):
        raise AssertionError("A run doesn't end.")
    return Moments((folder / "began").stat().st_mtime - began, time.time() - began)


def killed(folder: Path, tally: Tally, moments: Moments, *, is_fresh: bool) -> None:
    """Begin a run again and again until it ends; kill it while kills are left."""
    folder.mkdir()
    update: int | None = None
    early = 0  # kills before the first checkpoint
    while True:
        (folder / "began").unlink(missing_ok=True)
        junk = hidden(folder)
        is_last = tally.kills == tally.times
        process = Process(folder, is_fresh=is_fresh)
        tally.starts += 1
        tally.resumed += update is not None
        seconds = LONGEST_SECONDS if is_last else moments.draw()
        if update is None:  # the machine may have become slower
            seconds *= 2**early
        has_ended = process.ends_within(seconds) or not process.kill()
        check_begun(folder, update, tally)
        update = check_usable(folder, update)
        if has_ended:
            tally.runs += 1
            return
        if is_last:
            raise AssertionError("A run that is begun again doesn't end.")
        tally.kills += 1
        tally.during_writes += bool(hidden(folder) - junk)
        early += update is None
        tally.before_first += update is None


def hidden(folder: Path) -> set[str]:
    """What is there only while a checkpoint is written or deleted."""
    backup = folder / "backup"
    names = os.listdir(backup) if backup.is_dir() else []
    return {name for name in names if name.startswith(".")}


def check_begun(folder: Path, update: int | None, tally: Tally) -> None:
    """Did the start go on from the checkpoint that there was?"""
    began = folder / "began"
    text = began.read_text() if began.exists() else ""
    if not text:  # killed before its first call
        return
    tally.updates.add(int(text))
    if int(text) != (update or 0):
        raise AssertionError(f"A start went on at {text}, the checkpoint is {update}.")


def check_usable(folder: Path, before: int | None) -> int | None:
    """Load the newest checkpoint, as the next start will.

    Returns:
        Its update; None if none was ever written.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a damaged one is passed over with a warning
        found = CheckpointStore(folder / "backup").load_latest()
    update = None if found is None else int(found[1].state["run"]["updates"])
    if before is not None and (update is None or update < before):
        raise AssertionError(f"There was a checkpoint of {before}, and is of {update}.")
    return update


def check_equal(folder: Path, expected: dict[str, bytes]) -> None:
    """Compare what a run left behind."""
    found = left_behind(folder)
    odd = [n for n in {*found, *expected} if found.get(n) != expected.get(n)]
    if odd:
        raise AssertionError(f"{folder.name} differs: {', '.join(sorted(odd))}.")


def main(arguments: list[str] | None = None) -> None:
    """Kill, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=200, help="kills in total")
    parser.add_argument("--seed", type=int, default=5, help="of the moments")
    parser.add_argument("--fresh", action="store_true", help="fork nothing")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.train is not None:
        train(args.train)
        return
    tally = Tally(args.times)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "here").mkdir()
        train(folder / "here")  # forks find imported what this has imported
        random.seed(args.seed)
        expected = left_behind(folder / "here")
        moments = uninterrupted(folder / "uninterrupted", is_fresh=args.fresh)
        check_equal(folder / "uninterrupted", expected)
        while tally.kills < tally.times:
            place = folder / f"killed-{tally.runs}"
            killed(place, tally, moments, is_fresh=args.fresh)
            check_equal(place, expected)
    print(tally.summary(time.monotonic() - began))


if __name__ == "__main__":
    main()
