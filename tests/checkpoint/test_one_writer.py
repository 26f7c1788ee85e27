# SPDX-License-Identifier: Apache-2.0
"""Several processes: one writes, all hear how it went."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ipufit import IPUModel, load_checkpoint
from ipufit.checkpoint import CheckpointStore, load_weights, written_by_one
from tests.processes import printed_lines

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)

SCRIPT = """
import os, sys
import torch
from torch import distributed
import ipufit
from ipufit.checkpoint import Checkpoint, written_by_one

rank, folder = int(sys.argv[1]), sys.argv[2]
os.chdir(folder)
distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
)

module = torch.nn.Linear(1, 1)
torch.nn.init.constant_(module.weight, rank)
model = ipufit.IPUModel(module)
model.compile("sgd", "mse")
model.save("whole")
model.save_weights("weights.safetensors")
store = ipufit.CheckpointStore("store", keep_last=1)
paths = [store.save(Checkpoint({}, {"rank": rank}), epoch=0, update=n) for n in (1, 2)]
assert os.path.isdir(paths[-1]) and store.all() == [paths[-1]], store.all()

from ipufit.callbacks import checkpoints
if rank:  # writes nothing
    checkpoints.write_checkpoint = checkpoints.save_weights = None
def fit(*callbacks):
    x = torch.ones(4, 1)
    model.fit(x, x, 2, epochs=2, verbose=0, callbacks=list(callbacks))
fit(
    ipufit.ModelCheckpoint("fitted"),
    ipufit.ModelCheckpoint("kept", keep=1),
    ipufit.ModelCheckpoint("fitted.safetensors"),
    ipufit.BackupAndRestore("backup"),
)
assert not os.path.exists("backup")
fit(
    ipufit.ModelCheckpoint("behind", is_background=True),
    ipufit.ModelCheckpoint("kept-behind", keep=1, save_freq=1, is_background=True),
    ipufit.ModelCheckpoint("behind.safetensors", is_background=True),
    ipufit.ModelCheckpoint("by-clock-{batch}-{loss:.0f}", save_seconds=1e-9 + 9 * rank),
)

open("file", "w").close()
try:
    model.save("file/below")
except ipufit.CheckpointError as error:
    print("failed:", error.errno, error)
def fail():
    raise ValueError(f"of process {rank}")
try:
    written_by_one(fail)
except (ValueError, ipufit.CheckpointError) as error:
    print(type(error).__name__, error)
try:
    store.save(Checkpoint({"Ä ": {}}), epoch=0, update=3)
except ipufit.UnsupportedError:
    print("unsupported")
# gloo aborts some processes that end with a group: its threads may still run while the
# interpreter ends. So this one doesn't end in order, once nobody waits for it.
distributed.barrier()
sys.stdout.flush()
os._exit(0)
"""


def test_the_first_writes_and_all_hear(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = []
    try:
        for process in processes:
            out, error = process.communicate(timeout=300)
            assert process.returncode == 0, error
            said.append(printed_lines(out))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [lines[1:] for lines in said] == [
        ["ValueError of process 0", "unsupported"],
        ["CheckpointError of process 0", "unsupported"],
    ]
    assert said[0][0].startswith("failed: 20 ")  # ENOTDIR
    assert said[0][0] == said[1][0]
    checkpoint = load_checkpoint(tmp_path / "whole")
    assert checkpoint.tensors["model"]["weight"].item() == 0
    assert load_weights(tmp_path / "weights.safetensors")["weight"].item() == 0
    assert load_checkpoint(tmp_path / "fitted").state["run"]["epoch"] == 2
    (path,) = CheckpointStore(tmp_path / "kept").all()
    assert load_checkpoint(path).state["run"]["epoch"] == 2
    load_weights(tmp_path / "fitted.safetensors")
    assert load_checkpoint(tmp_path / "behind").state["run"]["epoch"] == 2
    (path,) = CheckpointStore(tmp_path / "kept-behind").all()
    assert load_checkpoint(path).state["run"]["updates"] == 4
    load_weights(tmp_path / "behind.safetensors")
    assert list(tmp_path.glob("by-clock-*"))
    (path,) = CheckpointStore(tmp_path / "store").all()
    assert load_checkpoint(path).state == {"rank": 0}


def test_one_process_alone_needs_no_group(tmp_path):
    assert written_by_one(lambda: "here") == "here"
    model = IPUModel(torch.nn.Linear(1, 1))
    model.save_weights(tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").exists()
