# SPDX-License-Identifier: Apache-2.0
"""One run at a time has a directory of checkpoints, and another is told who has it."""

from __future__ import annotations

import contextlib
import os
import platform
import signal

import pytest

from ipufit import BackupAndRestore, LambdaCallback, ModelCheckpoint
from ipufit.checkpoint import CheckpointStore
from ipufit.errors import ConfigError
from tests import reference
from tests.files.test_readers import before_steps
from tests.reference import samples

pytestmark = pytest.mark.usefixtures("unsynced")
STEPS = ("mkdir", "open", "stat", "lstat", "fstat", "read")


def fit(folder, *hooks, keep=BackupAndRestore):
    model = reference.compiled()
    callbacks = [keep(folder), *(LambdaCallback(on_epoch_end=hook) for hook in hooks)]
    return model.fit(*samples(8), batch_size=4, verbose=0, callbacks=callbacks)


def in_store(folder):
    return ModelCheckpoint(folder, "loss", keep=1)


@pytest.mark.parametrize("first", [BackupAndRestore, in_store])
@pytest.mark.parametrize("second", [BackupAndRestore, in_store])
def test_a_second_run_is_told_who_has_the_directory(tmp_path, first, second):
    said = (
        rf"Another run has '.*run': process {os.getpid()} on {platform.node()}, since"
    )

    def begin_another(epoch, logs):
        with pytest.raises(ConfigError, match=said):
            fit(tmp_path / "run", keep=second)

    history = fit(tmp_path / "run", begin_another, keep=first)
    assert history.epoch == [0]
    fit(tmp_path / "run", keep=first)  # it is free again


def test_a_run_that_fails_lets_the_directory_go(tmp_path):
    def fail(epoch, logs):
        raise ArithmeticError

    folder = tmp_path / "run"
    with pytest.raises(ArithmeticError):
        fit(folder, fail)
    assert not folder.exists()  # nothing was saved
    folder.mkdir()
    with pytest.raises(ArithmeticError):
        fit(folder, fail)
    assert [*folder.iterdir()] == []


def test_a_killed_run_lets_the_directory_go_though_its_loader_lives(tmp_path):
    folder = tmp_path / "run"
    reading, writing = os.pipe()
    has_forked, forks = os.pipe()

    def fork_and_die(epoch, logs):
        if not os.fork():  # as a loading process
            os.write(forks, b"1")  # it has let the lock go by now
            os.close(writing)
            os.read(reading, 1)  # until the test ends
            os._exit(0)
        os.read(has_forked, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            fit(folder, fork_and_die)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert (folder / ".lock").exists()
    try:
        fit(folder)
    finally:
        for descriptor in (writing, reading, has_forked, forks):
            os.close(descriptor)
    assert not folder.exists()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_directory_that_is_released_meanwhile_is_refused_or_kept(
    tmp_path, monkeypatch, is_there
):
    folder, release_at, has_released, kept = tmp_path / "run", 0, True, []
    while has_released:
        if is_there:
            folder.mkdir(exist_ok=True)
        with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
            first.enter_context(CheckpointStore(folder).held())

            def release(step, first=first, release_at=release_at):
                if step == release_at:
                    first.close()

            is_refused = contextlib.suppress(ConfigError)
            with before_steps(monkeypatch, release, STEPS) as taken, is_refused:
                second.enter_context(CheckpointStore(folder).held())
                kept.append(release_at)
            has_released = len(taken) > release_at
            if release_at in kept:
                with pytest.raises(ConfigError, match="Another run has"):
                    first.enter_context(CheckpointStore(folder).held())
        assert folder.exists() is is_there
        release_at += 1
    assert len(kept) > 2


@pytest.mark.parametrize("which", ["run", "."])
def test_a_link_that_leads_nowhere_is_not_waited_for(tmp_path, which):
    place = tmp_path / "runs"
    store = CheckpointStore(place / "run")
    link = place / which
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "unmounted")
    with store.held():
        assert not (tmp_path / "unmounted").exists()


def test_a_directory_that_takes_no_files_is_not_waited_for():
    with CheckpointStore("/proc/self").held():  # says of new files that they are gone
        assert not os.path.exists("/proc/self/.lock")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_no_other_file_is_written_to_through_a_link(tmp_path, link):
    folder, file = tmp_path / "run", tmp_path / "file"
    folder.mkdir()
    file.write_text("of somebody")
    link(file, folder / ".lock")
    fit(folder)
    assert file.read_text() == "of somebody"
