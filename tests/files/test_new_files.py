# SPDX-License-Identifier: Apache-2.0
"""Every file is whole or not there, and no planted link is followed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ipufit import CSVLogger, FileError, IPUConfig, poptorch
from ipufit.checkpoint import (
    CheckpointStore,
    load_checkpoint,
    load_weights,
    save_weights,
    write_checkpoint,
)
from tests.conformance.recording import Recording
from tests.files.faults import at_step, full_disk, killed_at_step
from tests.files.samples import names, number_of, sample
from tests.reference import compiled, samples

X = torch.zeros(4, 3)


def network(number):
    module = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(module.bias, float(number))
    return module


def write_weights(path, number):
    save_weights(network(number).state_dict(), path)


def read_weights(path):
    return load_weights(path)["bias"][0].item()


def write_executable(path, number):
    poptorch.inferenceModel(network(number)).compileAndExport(str(path), X)


def read_executable(path):
    return poptorch.load(str(path))(X)[0, 0].item()


def write_export(path, number):
    compiled(network(number), IPUConfig(micro_batch_size=4)).export(path, X)


def read_export(path):
    described = path.with_name(f"{path.name}.json")
    if described.exists():
        about = json.loads(described.read_text("utf-8"))
        assert about["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    return read_executable(path)


KINDS = {
    "a.safetensors": (write_weights, read_weights),
    "executable.popef": (write_executable, read_executable),
    "export.popef": (write_export, read_export),
}


def write_saved(path, number):
    write_checkpoint(path, sample(number))


def read_saved(path):
    return number_of(load_checkpoint(path))


def write_store(path, number):
    CheckpointStore(path, keep_last=1).save(sample(number), epoch=0, update=number)


def read_store(path):
    return number_of(CheckpointStore(path).load_latest()[1])


CHECKPOINTS = {
    "saved": (write_saved, read_saved),
    "store": (write_store, read_store),
}


@pytest.mark.parametrize("name", [*KINDS, *CHECKPOINTS])
def test_a_writer_killed_at_any_step_leaves_the_old_file_or_the_new(tmp_path, name):
    write, read = {**KINDS, **CHECKPOINTS}[name]
    path = tmp_path / name
    numbers = set()
    for step in itertools.count():
        write(path, 1)
        assert not [*tmp_path.rglob(".*")]  # nothing is left of a killed writer
        assert name != "store" or len(names(path)) == 1
        with killed_at_step(step) as taken:
            write(path, 2)
        numbers.add(read(path))
        if len(taken) <= step:
            break
    assert step >= 3
    assert numbers == {1, 2}


@pytest.mark.parametrize("name", KINDS)
def test_no_planted_link_is_followed_and_leftovers_are_deleted(tmp_path, name):
    write, read = KINDS[name]
    path, victim = tmp_path / name, tmp_path / "victim"
    victim.write_text("kept")
    others = [f".{name}.x.partial", f".{name}0.01234567.partial"]
    for other in [*others, f".{name}.01234567.partial"]:
        (tmp_path / other).write_text("half of it")
    path.symlink_to(victim)
    (tmp_path / f".{name}.89abcdef.partial").symlink_to(victim)
    write(path, 1)
    assert victim.read_text() == "kept"
    assert not path.is_symlink()
    assert read(path) == 1
    left = {*names(tmp_path)} - {name, f"{name}.json", "victim"}
    assert {*others} <= left <= {*others, f".{name}.89abcdef.partial"}


def test_writers_of_one_file_at_once_delete_nothing_of_each_other(tmp_path):
    name = "a.safetensors"
    write, read = KINDS[name]
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(write, tmp_path / name, n % 5 + 1) for n in range(40)]
    assert [run.result() for run in runs] == [None] * 40
    assert read(tmp_path / name) in range(1, 6)
    assert names(tmp_path) == [name]


def test_a_full_disk_keeps_what_was_recorded(tmp_path):
    about = {"format": 1, "poptorch": "3.3", "device": "IPU Bow", "date": "2026-01-01"}
    counts = []
    for step in itertools.count():
        path = tmp_path / f"{step}.json"
        recording = Recording(path, about)
        try:
            with at_step(step, full_disk):
                for name in ("sgd", "adam", "lamb"):
                    outcome = {"": {"value": 1}}
                    recording.probes[name] = {"source": "", "outcome": outcome}
                    recording.write()
        except OSError:
            counts.append(len(Recording.read(path).probes) if path.exists() else 0)
        else:
            break
    assert {*counts} == {0, 1, 2, 3}
    assert counts == sorted(counts)


def fit(logger):
    x, y = samples(4)
    compiled().fit(x, y, 4, verbose=0, callbacks=logger)


@pytest.mark.parametrize(
    "use",
    [
        lambda path: load_weights(path),
        lambda path: Recording.read(path),
        lambda path: fit(CSVLogger(path)),
        lambda path: fit(CSVLogger(path, append=True)),
        lambda path: poptorch.load(path),
        lambda path: poptorch.inferenceModel(network(1)).loadExecutable(path),
        lambda path: poptorch.importPoptorchMetadataFromFile(path),
    ],
)
def test_a_pipe_is_refused_at_once(tmp_path, use):
    path = tmp_path / "pipe.safetensors"
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"regular file|No such device"):
        use(path)


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_draft_that_may_be_another_process_s_stays(tmp_path, monkeypatch, has_locks):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", none)
    (tmp_path / ".a.safetensors.0123abcd.partial").write_bytes(b"half")
    write_weights(tmp_path / "a.safetensors", 1)
    assert read_weights(tmp_path / "a.safetensors") == 1
    assert len(names(tmp_path)) == (1 if has_locks else 2)


def test_a_name_that_is_too_long_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(FileError, match="Give a shorter name"):
        write_weights(tmp_path / f"{'w' * 235}.safetensors", 1)
