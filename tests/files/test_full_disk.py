# SPDX-License-Identifier: Apache-2.0
"""A disk that is full, or fails, at any step leaves the previous checkpoint whole."""

from __future__ import annotations

import errno
import itertools
import os
import warnings

import pytest

from ipufit.checkpoint import CheckpointStore, load_checkpoint, write_checkpoint
from ipufit.errors import CheckpointError, CheckpointWarning
from tests.files.faults import at_step, full_disk
from tests.files.samples import names, number_of, sample


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
    return taken[step] == "fsync" and "replace" in taken[:step]


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
