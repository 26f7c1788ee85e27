# SPDX-License-Identifier: Apache-2.0
"""Runs of several processes, one of which fails: a program that tests/processes runs.

    python -m tests.processes.ending FOLDER COUNT CASE ...

A case is `WHAT,PHASE,INDEX`: what happens in which process, and when. Each is run by
forks of this program, which has no other threads. It prints a line of JSON for each:
the exit codes, the seconds, and the output of all processes together.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
from torch.utils.data import Dataset

import ipufit
from ipufit.distributed import get_process_info
from tests.ports import free_port

LONGEST_SECONDS = 100.0
NOBODY = "nothing,never,0"


class OwnError(Exception):
    """The error of the process that fails."""


def fail(what):
    """End this process in a way."""
    if what == "raise":
        raise OwnError("it failed here")
    if what == "exit":
        sys.exit(0)
    if what == "die":
        os._exit(7)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)


class Failing(ipufit.Callback):
    """Fails in one process at one moment."""

    is_saved = False

    def __init__(self, what, phase, index):
        self.what, self.phase, self.index = what, phase, int(index)

    def at(self, phase):
        if phase == self.phase and get_process_info().index == self.index:
            self.phase = "over"
            fail(self.what)

    def on_train_begin(self, logs):
        self.at("on_train_begin")

    def on_train_batch_begin(self, batch, logs):
        self.at("first batch")
        if self.run.updates == 5:
            self.at("training")

    def on_train_batch_end(self, batch, logs):
        if self.run.updates == 6:  # the action after that of the backup
            self.run.after_hooks(lambda: self.at("checkpoint"))

    def on_test_batch_end(self, batch, logs):
        self.at("validation")

    def on_epoch_end(self, epoch, logs):
        if epoch == 2:
            self.at("last epoch")

    def on_train_end(self, logs):
        self.at("on_train_end")

    def close(self):
        self.at("close")


class Rows(Dataset):
    def __init__(self, failing):
        self.failing = failing
        self.asked = 0

    def __len__(self):
        return 32

    def __getitem__(self, index):
        self.asked += 1
        if self.asked == 20:
            self.failing.at("dataset")
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, generator=generator), torch.ones(1)


class Network(torch.nn.Module):
    def __init__(self, what):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Dropout(0.1))
        self.what = what

    def forward(self, x):
        fail(self.what)
        return self.layers(x)


def train(folder, case):
    """The run of every process."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    failing = Failing(*case.split(","))
    what, phase, index = case.split(",")
    is_own = phase == "forward" and get_process_info().index == int(index)
    network = Network(what if is_own else "nothing")
    model = ipufit.IPUModel(network, ipufit.IPUConfig(seed=5))
    model.compile(ipufit.Optimizer("sgd", 0.1, momentum=0.9), "mse")
    history = model.fit(
        Rows(failing),
        batch_size=8,
        epochs=3,
        verbose=0,
        validation_data=(torch.ones(8, 3), torch.zeros(8, 1)),
        callbacks=[
            ipufit.BackupAndRestore(f"{folder}/backup", save_freq=3),
            ipufit.ModelCheckpoint(f"{folder}/kept", keep=1),
            failing,
        ],
    )
    failing.at("after")
    model.save(f"{folder}/learnt")
    return history


def run(folder, count, case):
    """Run a case in processes of its own, and describe their end."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    port = free_port()
    output = folder / f"{case}.txt"
    began = time.monotonic()
    pids = [_fork(folder, case, i, count, port, output) for i in range(count)]
    codes = {}
    while len(codes) < count and time.monotonic() - began < LONGEST_SECONDS:
        for index, pid in enumerate(pids):
            if index not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[index] = _code(found[1])
        time.sleep(0.005)
    for index, pid in enumerate(pids):
        if index not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return {
        "codes": [codes.get(index) for index in range(count)],
        "seconds": time.monotonic() - began,
        "output": output.read_text(),
    }


def _code(status):
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _fork(folder, case, index, count, port, output):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(
            RANK=str(index),
            LOCAL_RANK=str(index),
            WORLD_SIZE=str(count),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        with output.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        train(folder, case)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001 - nothing may reach the parent's code
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main(folder, count, *cases):
    """Run all cases."""
    warnings.simplefilter("error")
    train(f"{folder}/alone", NOBODY)  # forks find imported what this has imported
    for number, case in enumerate(cases):
        result = json.dumps(run(f"{folder}/{number}", int(count), case))
        sys.stdout.write(f"{result}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
