# SPDX-License-Identifier: Apache-2.0
"""A disk that is full, or fails, at any step leaves the previous checkpoint whole."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from ipufit.checkpoint import CheckpointStore, load_checkpoint, write_checkpoint
from ipufit.errors import CheckpointError, CheckpointWarning
from tests.checkpoint.faults import at_step, full_disk
from tests.checkpoint.samples import names, number_of, sample

ROOT = Path(__file__).parent.parent.parent
TINY = """
import sys, torch
from ipufit.checkpoint import Checkpoint, CheckpointStore
from ipufit.errors import CheckpointError

store = CheckpointStore(sys.argv[1])
for update in range(100):
    try:
        store.save(
            Checkpoint({"model": {"w": torch.full((2**12,), float(update))}}),
            epoch=0, update=update,
        )
    except CheckpointError as error:
        path, checkpoint = store.load_latest()
        values = set(checkpoint.tensors["model"]["w"].tolist())
        print(error.errno, update, values == {update - 1.0}, error)
        print(all(not p.name.startswith(".") for p in store.directory.iterdir()))
        break
"""


@pytest.fixture
def _quick(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # its failures are real


def failure(run, *arguments, **keywords):
    """The error that a function raises, if it does."""
    try:
        run(*arguments, **keywords)
    except CheckpointError as error:
        return error
    return None


def has_its_name(taken, step):
    """Whether what failed is to sync the directory after the new one was renamed."""
    return taken[step] == "fsync" and "rename" in taken[:step]


@pytest.mark.usefixtures("_quick")
def test_each_step_of_an_overwrite_may_fail(tmp_path):
    target = tmp_path / "saved"
    failures = 0
    for step in itertools.count():
        write_checkpoint(target, sample(step))
        assert names(tmp_path) == ["saved"]
        with at_step(step, full_disk) as taken:
            error = failure(write_checkpoint, target, sample(step + 1))
        number = number_of(load_checkpoint(target))
        if error is None:
            assert number == step + 1
        else:
            assert number == step + has_its_name(taken, step)
            assert error.errno == errno.ENOSPC
            assert str(target) in str(error)
            failures += 1
        if len(taken) <= step:
            break
    assert failures > 15


@pytest.mark.usefixtures("_quick")
def test_each_step_of_a_save_may_fail(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    failures = warned = 0
    for step in itertools.count():
        old, new = 2 * step, 2 * step + 1
        store.save(sample(old), epoch=0, update=old)
        assert names(tmp_path) == [f"update-{old:08d}"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with at_step(step, full_disk) as taken:
                error = failure(store.save, sample(new), epoch=0, update=new)
        number = number_of(store.load_latest()[1])
        if error is None:
            assert number == new
        else:
            assert number == old + has_its_name(taken, step)
            assert error.errno == errno.ENOSPC
            assert "keep fewer" in str(error)
            failures += 1
        assert all(warning.category is CheckpointWarning for warning in caught)
        warned += len(caught)
        if len(taken) <= step:
            break
    assert failures > 15
    assert warned > 3  # what couldn't be deleted


@pytest.mark.thorough
def test_a_file_system_that_is_really_full(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    script = (
        'mount -t tmpfs -o size=192k none "$1" || exit 77\nexec "$2" -c "$3" "$1/store"'
    )
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    done = subprocess.run(
        [*namespace, "sh", "-c", script, "sh", tmp_path, sys.executable, TINY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no mount in a namespace of its own")
    assert done.returncode == 0, done.stderr
    said, clean = done.stdout.splitlines()
    number, update, is_previous, *_ = said.split()
    assert int(number) == errno.ENOSPC
    assert int(update) > 2
    assert is_previous == "True"
    assert "No space left" in said
    assert clean == "True"
