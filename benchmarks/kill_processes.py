# SPDX-License-Identifier: Apache-2.0
"""Do processes that train together lose anything, or hang, when some are killed?

Four emulated processes train the run of `benchmarks.kill`: dropout, noise, shuffling,
averaged weights, a schedule, early stopping, a backup every few updates, a validation
every epoch. At a random moment a random choice of them is killed with SIGKILL:

    python -m benchmarks.kill_processes --times 100

The others must end by themselves with an error, soon and without a process that hangs.
No checkpoint may be broken, and all are begun again until the run ends. What it leaves
must be what four processes leave that nobody killed, byte by byte. Prints a summary;
fails if any of this doesn't hold.

The processes are forks of this one, which has imported torch and has no threads.
`--fresh` starts interpreters instead, whose ends count, too.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kill import (
    NoisyRows,
    check_begun,
    check_equal,
    check_usable,
    hidden,
    left_behind,
)
from ipufit import (
    BackupAndRestore,
    Callback,
    EarlyStopping,
    IPUConfig,
    IPUModel,
    Optimizer,
)
from ipufit.distributed import get_process_info

COUNT = 4
EPOCHS, BATCHES, BATCH_SIZE, SAVE_FREQ = 6, 16, 8, 5
TIMEOUT_SECONDS = 20.0  # that a process waits for others which live
LONGEST_SECONDS = 300.0
PHASES = ("beginning", "training", "checkpoint", "validation", "end")


# A process that trains ----------------------------------------------------------------


class Phase(Callback):
    """Marks in shared memory what this process does."""

    is_saved = False
    reads_batch_logs = False

    def __init__(self, marks: Any) -> None:
        self.marks = marks

    def mark(self, phase: str) -> None:
        """Have the one that kills see what is under way."""
        if self.marks is not None:
            self.marks[get_process_info().index] = PHASES.index(phase)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Training."""
        self.mark("training")

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """Validation, which the next call of training ends."""
        self.mark("validation")

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """Training again: the epoch ends."""
        self.mark("training")

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """The end."""
        self.mark("end")


class Backup(BackupAndRestore):
    """Marks when a checkpoint is under way."""

    phase: Phase

    @property
    def state_name(self) -> str:
        """As of its base."""
        return "BackupAndRestore"

    def _save(self) -> None:
        self.phase.mark("checkpoint")
        super()._save()
        self.phase.mark("training")


class Witness(Callback):
    """Writes down where a start goes on."""

    is_saved = False
    reads_batch_logs = False
    writes_for_all = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Only before its first call."""
        if not self.path.exists():
            self.path.write_text(str(self.run.updates))


def train(folder: Path, marks: Any = None) -> None:
    """Begin or go on with the run of a folder; process 0 writes what it learnt."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    x = torch.randn(BATCHES * BATCH_SIZE, 6)
    y = x @ torch.randn(6, 1) + 0.5 * torch.randn(len(x), 1)
    network = torch.nn.Sequential(
        torch.nn.Linear(6, 32),
        torch.nn.BatchNorm1d(32),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(32, 1),
    )
    model = IPUModel(network, IPUConfig(seed=11))
    model.compile(
        Optimizer("adam", 0.01, ema_momentum=0.9), "mse", lr_schedule="cosine"
    )
    backup = Backup(folder / "backup", SAVE_FREQ, delete_checkpoint=False)
    backup.phase = Phase(marks)
    history = model.fit(
        NoisyRows(x, y),
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        verbose=0,
        validation_data=(x.repeat(4, 1), y.repeat(4, 1) + 1.0),
        validation_batch_size=8,
        callbacks=[
            EarlyStopping(patience=2, restore_best_weights=True),
            backup,
            backup.phase,
            Witness(folder / "began"),
        ],
    )
    if get_process_info().is_first:
        rows = [history.epoch, history.history, model.num_updates]
        (folder / "history.json").write_text(json.dumps(rows))
    model.save(folder / "learnt")


# Processes that train together --------------------------------------------------------


@dataclass
class Together:
    """Processes that train a run together.

    Attributes:
        pids: Of those that run, by their number.
        ended: Exit status of the others, by their number.
        output: Where they write.
    """

    pids: dict[int, int]
    output: Path
    ended: dict[int, int] = field(default_factory=dict)

    @classmethod
    def started(cls, folder: Path, marks: Any, *, is_fresh: bool) -> Together:
        """Start all of them, as torchrun would."""
        port = _free_port()
        output = folder / "output.txt"
        pids = {}
        for index in range(COUNT):
            variables = {
                "RANK": str(index),
                "LOCAL_RANK": str(index),
                "WORLD_SIZE": str(COUNT),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "IPUFIT_PROCESS_TIMEOUT": str(TIMEOUT_SECONDS),
                "POPTORCH_LOG_LEVEL": "ERR",
            }
            start = _fresh if is_fresh else _fork
            pids[index] = start(folder, marks, variables, output)
        return cls(pids, output)

    def end_within(self, seconds: float) -> bool:
        """Wait so long for the end of all."""
        until = time.monotonic() + seconds
        while self.pids:
            for index, pid in list(self.pids.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.ended[index] = status
                    del self.pids[index]
            if self.pids and time.monotonic() >= until:
                return False
            time.sleep(0.001)
        return True

    def kill(self, indices: list[int]) -> list[int]:
        """Kill some; returns those that lived."""
        lived = [index for index in indices if index in self.pids]
        for index in lived:
            os.kill(self.pids[index], signal.SIGKILL)
        return lived

    @property
    def have_failed(self) -> bool:
        """Whether one has ended by an error, or was killed."""
        return any(self.ended.values())

    @property
    def said(self) -> str:
        """The output of all of them."""
        return self.output.read_text(errors="replace")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _fork(folder: Path, marks: Any, variables: dict[str, str], output: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(variables)
        with output.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        warnings.simplefilter("error")
        train(folder, marks)
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may reach the parent's code
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _fresh(folder: Path, marks: Any, variables: dict[str, str], output: Path) -> int:
    command = [sys.executable, "-m", "benchmarks.kill_processes", "--train", folder]
    with output.open("a") as file:
        to = file.fileno()
        files = [(os.POSIX_SPAWN_DUP2, to, 1), (os.POSIX_SPAWN_DUP2, to, 2)]
        environment = {**os.environ, **variables}
        return os.posix_spawn(sys.executable, command, environment, file_actions=files)


# The one that kills -------------------------------------------------------------------


@dataclass
class Tally:
    """What happened.

    Attributes:
        times: Processes to kill.
        killed: Processes that were killed.
        phases: What they did then.
        during_writes: Times that a checkpoint was half written then.
        starts: Of all processes together.
        resumed: Of these, with a checkpoint to go on from.
        runs: That ended.
        updates: At which starts went on.
        seconds: From a kill to the end of the last process that wasn't killed.
    """

    times: int
    killed: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    during_writes: int = 0
    starts: int = 0
    resumed: int = 0
    runs: int = 0
    updates: set[int] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)

    def summary(self, seconds: float) -> str:
        """In words, for people."""
        phases = ", ".join(f"{self.phases[name]} in {name}" for name in PHASES)
        return (
            f"{self.killed} processes killed in {seconds:.0f} s: {phases}; "
            f"{self.during_writes} times a checkpoint was half written\n"
            f"the others ended {np.median(self.seconds):.2f} s later (median; at most "
            f"{max(self.seconds):.2f} s); none hung\n"
            f"{self.starts} starts of {COUNT} processes, {self.resumed} of them with a "
            f"checkpoint; they went on at {len(self.updates)} different updates\n"
            f"{self.runs} runs ended, each equal to the uninterrupted one byte by "
            "byte; no checkpoint was broken"
        )


def drawn(most: int) -> list[int]:
    """The processes to kill: mostly one."""
    number = min(most, random.choice([1, 1, 1, 2, 3, COUNT]))
    return random.sample(range(COUNT), number)


def interrupt(
    folder: Path, tally: Tally, marks: Any, seconds: float, *, is_fresh: bool
) -> bool:
    """Start all processes, and kill some; returns whether the run ended.

    Raises:
        AssertionError: The others don't end, or end without an error.
    """
    chosen = drawn(tally.times - tally.killed)
    together = Together.started(folder, marks, is_fresh=is_fresh)
    tally.starts += 1
    if not chosen:
        if not together.end_within(LONGEST_SECONDS):
            raise AssertionError(f"A run doesn't end. {together.said}")
    elif not together.end_within(seconds):
        lived = together.kill(chosen)
        at = time.monotonic()
        for index in lived:
            tally.phases[PHASES[marks[index]]] += 1
        tally.killed += len(lived)
        if not together.end_within(4 * TIMEOUT_SECONDS):  # torch connects again
            hanging = sorted(together.pids)
            together.kill(hanging)
            raise AssertionError(f"{hanging} hang: {together.said}")
        if lived:
            tally.seconds.append(time.monotonic() - at)
            return not together.have_failed
    if together.have_failed:
        raise AssertionError(f"Nobody was killed: {together.said}")
    return True


def killed(
    folder: Path, tally: Tally, marks: Any, longest: float, *, is_fresh: bool
) -> None:
    """Begin a run again and again until it ends; kill while kills are left."""
    folder.mkdir()
    update: int | None = None
    has_ended = False
    while not has_ended:
        (folder / "began").unlink(missing_ok=True)
        (folder / "output.txt").unlink(missing_ok=True)
        marks[:COUNT] = bytes(COUNT)
        tally.resumed += update is not None
        seconds = random.uniform(0.1, longest)
        has_ended = interrupt(folder, tally, marks, seconds, is_fresh=is_fresh)
        check_begun(folder, update, tally)
        update = check_usable(folder, update)
        tally.during_writes += bool(hidden(folder))
    tally.runs += 1


def main(arguments: list[str] | None = None) -> None:
    """Kill, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=100, help="processes to kill")
    parser.add_argument("--seed", type=int, default=5, help="of the moments")
    parser.add_argument("--fresh", action="store_true", help="fork nothing")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.train is not None:
        train(args.train)
        return
    random.seed(args.seed)
    tally = Tally(args.times)
    marks = mmap.mmap(-1, mmap.PAGESIZE)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "alone").mkdir()
        train(folder / "alone")  # forks find imported what this has imported
        whole = folder / "uninterrupted"
        whole.mkdir()
        start = time.monotonic()
        together = Together.started(whole, marks, is_fresh=args.fresh)
        if not together.end_within(LONGEST_SECONDS) or together.have_failed:
            raise AssertionError(f"A run doesn't end well. {together.said}")
        longest = time.monotonic() - start
        expected = left_behind(whole)
        while tally.killed < tally.times:
            place = folder / f"killed-{tally.runs}"
            killed(place, tally, marks, longest, is_fresh=args.fresh)
            check_equal(place, expected)
    print(tally.summary(time.monotonic() - began))


if __name__ == "__main__":
    main()
