# SPDX-License-Identifier: Apache-2.0
"""Several processes: one writes, all hear how it went."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

import pytest
import torch

import ipufit
from ipufit import CheckpointStore, load_checkpoint
from ipufit.callbacks import checkpoints
from ipufit.checkpoint import Checkpoint, load_weights, written_by_one
from ipufit.distributed import get_process_info


def saved(folder):
    """Save in every way, and return the words of what failed."""
    rank = get_process_info().index
    module = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(module.weight, rank)
    model = ipufit.IPUModel(module)
    model.compile("sgd", "mse")
    model.save(folder / "whole")
    model.save_weights(folder / "weights.safetensors")
    store = CheckpointStore(folder / "store", keep_last=1)
    state = Checkpoint({}, {"rank": rank})
    paths = [store.save(state, epoch=0, update=n) for n in (1, 2)]
    assert os.path.isdir(paths[-1])
    assert store.all() == [paths[-1]]

    def fit(*callbacks):
        x = torch.ones(4, 1)
        model.fit(x, x, 2, epochs=2, verbose=0, callbacks=list(callbacks))

    def checkpoint(name, **arguments):
        return ipufit.ModelCheckpoint(folder / name, **arguments)

    with contextlib.ExitStack() as stack:
        if rank:
            stack.enter_context(
                mock.patch.object(checkpoints, "write_checkpoint", None)
            )
        fit(
            checkpoint("fitted"),
            checkpoint("kept", keep=1),
            checkpoint("fitted.safetensors"),
            ipufit.BackupAndRestore(folder / "backup"),
        )
        assert not (folder / "backup").exists()
        fit(
            checkpoint("often", keep=1, save_freq=1),
            checkpoint("named-{batch}-{loss:.0f}", save_freq=1),
        )
    (folder / "file").touch()
    with pytest.raises(ipufit.CheckpointError) as below:
        model.save(folder / "file" / "below")

    def fail():
        raise ValueError(f"of process {rank}")

    with pytest.raises((ValueError, ipufit.CheckpointError)) as failed:
        written_by_one(fail)
    with pytest.raises(ipufit.UnsupportedError):
        store.save(Checkpoint({"Ä ": {}}), epoch=0, update=3)
    return (
        f"{below.value.errno} {below.value}",
        f"{failed.type.__name__} {failed.value}",
    )


def test_the_first_writes_and_all_hear(pool, tmp_path):
    (below, failed), (its_below, its_failed) = pool.run(saved, tmp_path)
    assert below == its_below
    assert below.startswith("20 ")  # ENOTDIR
    assert failed == "ValueError of process 0"
    assert its_failed == "CheckpointError of process 0"
    checkpoint = load_checkpoint(tmp_path / "whole")
    assert checkpoint.tensors["model"]["weight"].item() == 0
    assert load_weights(tmp_path / "weights.safetensors")["weight"].item() == 0
    (kept,) = CheckpointStore(tmp_path / "kept").all()
    for path in (tmp_path / "fitted", kept):
        assert load_checkpoint(path).state["run"]["epoch"] == 2
    (path,) = CheckpointStore(tmp_path / "often").all()
    assert load_checkpoint(path).state["run"]["updates"] == 4
    load_weights(tmp_path / "fitted.safetensors")
    assert list(tmp_path.glob("named-*"))
    (path,) = CheckpointStore(tmp_path / "store").all()
    assert load_checkpoint(path).state == {"rank": 0}
