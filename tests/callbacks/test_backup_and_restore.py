# SPDX-License-Identifier: Apache-2.0
"""When `BackupAndRestore` saves, and what it leaves."""

import contextlib
import os
import signal
import threading

import pytest
import torch

from ipufit import (
    BackupAndRestore,
    Callback,
    ConfigError,
    LambdaCallback,
    StopAfter,
    UnsupportedError,
)
from ipufit.checkpoint import read_manifest
from ipufit.errors import CheckpointWarning
from tests.callbacks.driving import linear
from tests.reference import AtEpochEnd, compiled

pytestmark = pytest.mark.usefixtures("unsynced")


def fit(*callbacks, epochs=2, count=16, **config):
    model = linear(2, **config)
    x, y = torch.rand(count, 2), torch.rand(count, 1)
    return model.fit(
        x, y, batch_size=2, epochs=epochs, verbose=0, callbacks=list(callbacks)
    )


def places(backup):
    records = [read_manifest(path).moment for path in backup.store.all()]
    return [(record.epoch, record.update) for record in records]


@pytest.mark.parametrize(
    ("save_freq", "config", "expected"),
    [
        ("epoch", {}, [(1, 8), (2, 16)]),
        (3, {}, [(0, 3), (0, 6), (1, 9), (1, 12), (1, 15)]),
        (20, {}, []),
        # After the call in which the number is reached.
        (5, {"device_iterations": 4}, [(0, 8), (1, 16)]),
    ],
)
def test_it_saves_as_often_as_asked(tmp_path, save_freq, config, expected):
    backup = BackupAndRestore(
        tmp_path, save_freq, delete_checkpoint=False, keep_last=99
    )
    fit(backup, **config)
    assert places(backup) == expected


def test_it_keeps_the_last_ones(tmp_path):
    backup = BackupAndRestore(tmp_path, 1, delete_checkpoint=False)
    fit(backup)
    assert [update for _, update in places(backup)] == [15, 16]


def test_updates_are_counted_on_in_a_resumed_run(tmp_path):
    def backup():
        return BackupAndRestore(tmp_path, 5, delete_checkpoint=False, keep_last=99)

    def fail():
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        fit(backup(), AtUpdate(7, fail))
    again = backup()
    fit(again)
    assert [update for _, update in places(again)] == [5, 10, 15]


# SIGTERM ------------------------------------------------------------------------


class AtUpdate(Callback):
    is_saved = False

    def __init__(self, update, action):
        self.update = update
        self.action = action
        self.last = 0

    def on_train_batch_end(self, batch, logs):
        self.last = self.run.updates
        if self.run.updates == self.update:
            self.action()


def evict(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("save_freq", ["epoch", 4])
def test_an_evicted_run_saves_the_call_under_way(
    tmp_path, is_before, save_freq, number, caplog
):
    backup = BackupAndRestore(tmp_path, save_freq)
    evicting = AtUpdate(5, lambda: evict(number))
    history = fit(*((evicting, backup) if is_before else (backup, evicting)))
    assert evicting.last == 5
    assert places(backup)[-1] == (0, 5)
    assert backup.run.stop_reason == "SIGTERM"
    assert history.epoch == []  # it isn't over
    name = signal.Signals(number).name
    assert f"fit() ends after update 5: {name} told it to." in caplog.text


@pytest.mark.parametrize(("update", "save_freq"), [(8, "epoch"), (16, 4)])
def test_an_eviction_in_the_last_call_of_an_epoch(tmp_path, update, save_freq):
    def backup():
        return BackupAndRestore(tmp_path / "run", save_freq)

    one, evicting = backup(), AtUpdate(update, evict)
    fit(one, evicting)
    assert evicting.last == update
    assert places(one)[-1] == (update // 8 - 1, update)
    counting = AtUpdate(-1, None)
    assert fit(backup(), counting).epoch == [0, 1]
    assert counting.last == (16 if update == 8 else 0)
    assert not (tmp_path / "run").exists()


def test_a_run_that_stops_by_itself_when_it_is_evicted_keeps_its_backup(tmp_path):
    stop = AtEpochEnd(lambda callback, logs: callback.run.stop("enough"), 0)
    end = AtEpochEnd(lambda callback, logs: evict(), 0)
    backup = BackupAndRestore(tmp_path / "run")
    assert fit(end, stop, backup).epoch == [0]
    assert places(backup) == [(1, 8)]  # the script may not get to save its model
    counting = AtUpdate(-1, None)
    end.action = lambda callback, logs: None
    assert fit(end, stop, BackupAndRestore(tmp_path / "run"), counting).epoch == [0]
    assert counting.last == 0
    assert not (tmp_path / "run").exists()


def test_streamed_metrics_can_not_be_saved_inside_an_epoch(tmp_path):
    def run(save_freq, *callbacks):
        model = compiled(torch.nn.Linear(2, 1), loss="mse", metrics=["spearman"])
        backup = BackupAndRestore(tmp_path, save_freq)
        data = {"batch_size": 2, "epochs": 2, "verbose": 0}
        x, y = torch.rand(16, 2), torch.rand(16, 1)
        try:
            model.fit(x, y, **data, callbacks=[*callbacks, backup])
        finally:
            updates.append(backup.run.updates)
        return backup

    updates = []
    with pytest.raises(UnsupportedError, match="middle of an epoch"):
        run(3)
    with pytest.warns(CheckpointWarning, match="couldn't be saved"):
        backup = run("epoch", AtUpdate(11, evict))
    assert updates == [3, 11]
    assert places(backup) == [(1, 8)]


@pytest.mark.parametrize("outcome", ["ends", "fails"])
def test_the_handler_of_the_signal_comes_back(tmp_path, outcome):
    def mine(number, frame):
        raise AssertionError("nobody sent a signal")

    def look(callback, logs):
        inside.append(signal.getsignal(signal.SIGTERM))
        if outcome == "fails":
            raise KeyError

    inside = []
    before = signal.signal(signal.SIGTERM, mine)
    try:
        with contextlib.suppress(KeyError):
            fit(BackupAndRestore(tmp_path), AtEpochEnd(look, 0))
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert inside != [mine]
    assert len(inside) == 1


@pytest.mark.parametrize(
    ("arguments", "job"), [({"minutes": 1.0}, None), ({"margin": 1.5}, 1150)]
)
def test_a_run_ends_before_its_time_is_up_and_goes_on(
    tmp_path, monkeypatch, capsys, caplog, arguments, job
):
    def train(*callbacks):
        torch.manual_seed(0)
        model = linear(2, device_iterations=1)
        x, y = torch.rand(16, 2), torch.rand(16, 1)
        options = {"batch_size": 2, "epochs": 2, "verbose": 0}
        history = model.fit(x, y, callbacks=list(callbacks), **options)
        return history.history, model.get_weights()

    if job is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(job))
    whole, backup, stop = train(), BackupAndRestore(tmp_path), StopAfter(**arguments)
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: 1000.0 + 12.1 * stop.run.updates)
        train(backup, stop)
    assert places(backup) == [(0, 5)]
    assert "the time is up" in capsys.readouterr().out
    assert "fit() ends after update 5: StopAfter told it to." in caplog.text
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    rest = train(BackupAndRestore(tmp_path), StopAfter(minutes=60))
    torch.testing.assert_close(rest, whole, rtol=0, atol=0)


def test_without_a_backup_a_run_ends_all_the_same():
    stop = StopAfter(minutes=1e-9)
    assert fit(stop).epoch == []
    assert stop.run.updates < 16


@pytest.mark.parametrize("minutes", [0, -1.0, float("nan"), None])
def test_a_time_that_is_none_is_refused(minutes, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.raises(ConfigError, match="StopAfter"):
        StopAfter(minutes)


def test_an_eviction_at_the_end_of_an_epoch(tmp_path):
    backup = BackupAndRestore(tmp_path)
    counting = AtUpdate(-1, None)
    end = AtEpochEnd(lambda callback, logs: evict(), 0)
    assert fit(backup, counting, end).epoch == [0]
    assert counting.last == 8
    assert places(backup) == [(1, 8)]  # once, though its own hook had passed


def test_in_another_thread_it_saves_and_leaves_signals_alone(tmp_path):
    backup = BackupAndRestore(tmp_path, delete_checkpoint=False)
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=fit, args=(backup,))
    thread.start()
    thread.join()
    assert places(backup) == [(1, 8), (2, 16)]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_callback_that_interrupted_a_run_may_be_left_out(tmp_path):
    def interrupt(epoch, logs):
        raise InterruptedError

    backup = BackupAndRestore(tmp_path / "backup")
    with pytest.raises(InterruptedError):
        fit(LambdaCallback(on_epoch_end=interrupt), backup, epochs=3)
    assert fit(BackupAndRestore(tmp_path / "backup"), epochs=3).epoch == [0, 1, 2]
