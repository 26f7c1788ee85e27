# SPDX-License-Identifier: Apache-2.0
"""Where `BackupAndRestore` differs from Keras's; each is a row of the page."""

import contextlib
from pathlib import Path

import keras
import pytest

from ipufit import Callback, ConfigError
from ipufit.callbacks import BackupAndRestore, EarlyStopping
from tests.keras.twins import assert_same_weights, compiled, data, networks

pytestmark = pytest.mark.usefixtures("in_tmp_path")

THEIRS = keras.callbacks
KINDS = THEIRS.BackupAndRestore, BackupAndRestore
COMMON = {"batch_size": 4, "verbose": 0, "shuffle": False}


class _Failing:
    """Fails at the end of a batch of an epoch."""

    is_saved = False  # a resumed run may do without it

    def __init__(self, epoch, batch):
        super().__init__()
        self.at = epoch, batch

    def on_train_batch_end(self, batch, logs=None):
        if (self.current, batch) == self.at:
            raise RuntimeError("failed")


class KerasFailing(_Failing, THEIRS.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.current = epoch


class IpufitFailing(_Failing, Callback):
    @property
    def current(self):
        return self.run.epoch


class _Seeing:
    """Remembers the batches of the run, by their epochs."""

    is_saved = False

    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)


class KerasSeeing(_Seeing, THEIRS.Callback):
    pass


class IpufitSeeing(_Seeing, Callback):
    pass


FAILING, SEEING = (KerasFailing, IpufitFailing), (KerasSeeing, IpufitSeeing)


def folder(side):
    return ("theirs", "mine")[side]


def interrupted(side, *, epoch, batch, epochs=3, **arguments):
    """Have a fit of a new model fail; the batches have 4 of 24 samples each."""
    fitted = compiled(networks(), "adam")[side]
    callbacks = [KINDS[side](folder(side), **arguments), FAILING[side](epoch, batch)]
    with pytest.raises(RuntimeError, match="failed"):
        fitted.fit(*data(24), epochs=epochs, callbacks=callbacks, **COMMON)


def resumed(side, *, epochs=3, also=(), **arguments):
    """Fit another new model, which goes on; what became of it, and its history."""
    fitted = compiled(networks(seed=1), "adam")[side]
    callbacks = [KINDS[side](folder(side), **arguments), *also]
    history = fitted.fit(*data(24), epochs=epochs, callbacks=callbacks, **COMMON)
    return fitted, history


def test_a_backup_goes_on_in_the_middle_of_an_epoch():
    batches = []
    for side in (0, 1):
        interrupted(side, epoch=1, batch=4, save_freq=2)
        seen = SEEING[side]()
        fitted, _ = resumed(side, also=[seen], save_freq=2)
        batches.append(seen.batches)
    epoch = list(range(6))
    assert batches == [[*epoch, *epoch], [4, 5, *epoch]]
    model, _ = compiled(networks(), "adam")
    model.fit(*data(24), epochs=3, **COMMON)
    assert_same_weights(fitted.module, model)


def test_a_backup_has_its_epoch_after_two_failures_in_it():
    batches = []
    for side in (0, 1):
        interrupted(side, epoch=1, batch=2, save_freq=2)
        interrupted(side, epoch=1, batch=4, save_freq=2)
        seen = SEEING[side]()
        resumed(side, also=[seen], save_freq=2)
        batches.append(seen.batches)
    epoch = list(range(6))
    assert batches == [epoch * 3, [4, 5, *epoch]]


def test_a_backup_brings_history_back():
    epochs = []
    for side in (0, 1):
        interrupted(side, epoch=2, batch=0, epochs=5)
        epochs.append(resumed(side, epochs=5)[1].epoch)
    assert epochs == [[2, 3, 4], [0, 1, 2, 3, 4]]


class _Worse:
    """A figure that gets worse and worse."""

    is_saved = False

    def on_epoch_end(self, epoch, logs):
        logs["q"] = float(epoch)


class KerasWorse(_Worse, THEIRS.Callback):
    pass


class IpufitWorse(_Worse, Callback):
    pass


def test_a_backup_brings_callbacks_back():
    epochs = []
    for side, worse, stopping in (
        (0, KerasWorse, THEIRS.EarlyStopping),
        (1, IpufitWorse, EarlyStopping),
    ):
        ended = []
        for failing in ([FAILING[side](1, 2)], []):
            fitted = compiled(networks(), "adam")[side]
            stopper = stopping("q", patience=3, mode="min")
            backup = KINDS[side](folder(side))
            callbacks = [worse(), stopper, backup, *failing]
            with contextlib.suppress(RuntimeError):
                history = fitted.fit(*data(24), epochs=9, callbacks=callbacks, **COMMON)
                ended = history.epoch
        epochs.append(ended[-1])
    assert epochs == [4, 3]  # Keras's begins to wait anew


def test_a_fit_after_a_resumed_one_trains_all_its_epochs():
    counts = []
    for side in (0, 1):
        interrupted(side, epoch=2, batch=0)
        fitted, _ = resumed(side)
        counts.append(len(fitted.fit(*data(24), epochs=2, **COMMON).epoch))
    assert counts == [0, 2]


def test_backups_are_checkpoints():
    names = []
    for side in (0, 1):
        interrupted(side, epoch=1, batch=2)
        names.append(sorted(path.name for path in Path(folder(side)).iterdir()))
    assert names == [
        ["latest.weights.h5", "training_metadata.json"],
        ["update-00000006"],
    ]


def test_the_backup_before_a_damaged_one_is_used():
    epochs = []
    for side in (0, 1):
        interrupted(side, epoch=2, batch=2)
        newest = sorted(Path(folder(side)).glob("*[0-9h]*"))[-1]
        if side == 1:
            assert newest.name == "update-00000012"
            newest /= "model.safetensors"
        newest.write_bytes(newest.read_bytes()[:-50])
        with (
            pytest.raises(OSError, match="truncated")
            if side == 0
            else pytest.warns(UserWarning, match=r"model\.safetensors.*update-00000006")
        ):
            _, history = resumed(side)
            epochs.append(history.epoch)
    assert epochs == [[0, 1, 2]]
    THEIRS.BackupAndRestore("theirs", double_checkpoint=True)
    with pytest.raises(TypeError, match="double_checkpoint"):
        BackupAndRestore("mine", double_checkpoint=True)


def test_files_beside_a_backup_are_kept():
    left = []
    for side in (0, 1):
        Path(folder(side)).mkdir()
        Path(folder(side), "notes.txt").write_text("mine")
        fitted = compiled(networks(), "adam")[side]
        fitted.fit(*data(24), callbacks=[KINDS[side](folder(side))], **COMMON)
        left.append(Path(folder(side), "notes.txt").exists())
    assert left == [False, True]


@pytest.mark.parametrize("save_freq", [0, False])
def test_backing_up_every_zero_updates_is_refused(save_freq):
    THEIRS.BackupAndRestore("theirs", save_freq=save_freq)
    with pytest.raises(ConfigError, match="save_freq"):
        BackupAndRestore("mine", save_freq=save_freq)
