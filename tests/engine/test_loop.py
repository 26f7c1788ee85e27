# SPDX-License-Identifier: Apache-2.0
"""Hooks in Keras's order with Keras's keys, and how a run ends."""

from __future__ import annotations

import math

import pytest
import torch

from ipufit import Callback, History, IPUConfig, IPUModel, NonFiniteLossWarning
from ipufit.metrics import FunctionMetric
from tests.reference import AtEpochEnd, Recorder

X, Y = torch.randn(8, 3), torch.randn(8, 1)
VALIDATION = (torch.randn(6, 3), torch.randn(6, 1))


def make_model(config=None, metrics=("mae",)):
    model = IPUModel(torch.nn.Linear(3, 1), config or IPUConfig())
    model.compile("sgd", "mse", metrics=list(metrics))
    return model


def shape(calls):
    """Each hook's name, its index if it has one, and the keys of its logs."""
    return [
        (name, *[list(a) if isinstance(a, dict) else a for a in arguments])
        for name, arguments in calls
    ]


# From installed Keras 3.15.1, with 10 samples in batches of 4, which are 3 batches; our
# data makes 2 whole ones, because the shapes of a compiled model are fixed.
BATCHES = [
    ("on_train_batch_begin", 0, []),
    ("on_train_batch_end", 0, ["loss", "mae"]),
    ("on_train_batch_begin", 1, []),
    ("on_train_batch_end", 1, ["loss", "mae"]),
]
GOLDEN_FIT = [
    ("on_train_begin", []),
    ("on_epoch_begin", 0, []),
    *BATCHES,
    ("on_epoch_end", 0, ["loss", "mae"]),
    ("on_epoch_begin", 1, []),
    *BATCHES,
    ("on_test_begin", []),
    ("on_test_batch_begin", 0, []),
    ("on_test_batch_end", 0, ["loss", "mae"]),
    ("on_test_batch_begin", 1, []),
    ("on_test_batch_end", 1, ["loss", "mae"]),
    ("on_test_end", ["loss", "mae"]),
    ("on_epoch_end", 1, ["loss", "mae", "val_loss", "val_mae"]),
    ("on_train_end", ["loss", "mae", "val_loss", "val_mae"]),
]


def test_fit_calls_kerass_hooks_in_kerass_order_with_kerass_keys():
    recorder = Recorder()
    model = make_model()
    model.fit(
        X,
        Y,
        batch_size=4,
        epochs=2,
        validation_data=VALIDATION,
        validation_freq=2,
        callbacks=recorder,
        verbose=0,
    )
    assert shape(recorder.calls) == GOLDEN_FIT
    values = [v for _, args in recorder.calls for v in args[-1].values()]
    assert all(type(value) is float for value in values)


def test_a_call_of_several_updates_has_the_index_of_its_first_and_of_its_last():
    recorder = Recorder()
    model = make_model(IPUConfig(device_iterations=3))
    x, y = torch.randn(24, 3), torch.randn(24, 1)
    model.fit(x, y, batch_size=4, callbacks=recorder, verbose=0)
    batches = [(n, a[0]) for n, a in recorder.calls if "batch" in n]
    assert batches == [
        ("on_train_batch_begin", 0),
        ("on_train_batch_end", 2),
        ("on_train_batch_begin", 3),
        ("on_train_batch_end", 5),
    ]


def test_batch_logs_are_running_means_of_the_epoch():
    recorder = Recorder()
    model = make_model()
    history = model.fit(X, Y, batch_size=2, epochs=2, callbacks=recorder, verbose=0)
    ends = [args[-1]["loss"] for n, args in recorder.calls if n == "on_train_batch_end"]
    assert [ends[3], ends[7]] == history.history["loss"]
    assert len(set(ends)) == 8


def bias(outputs, targets):
    return outputs - targets


def test_figures_are_in_alphabetical_order_and_added_ones_after():
    def add(callback, logs):
        logs["added"] = 1.0

    model = make_model(metrics=["mae", FunctionMetric("zeta", bias), lambda o, t: o])
    recorder = Recorder()
    history = model.fit(
        X,
        Y,
        batch_size=4,
        validation_split=0.5,
        verbose=0,
        callbacks=[AtEpochEnd(add), [recorder]],
    )
    names = ["lambda", "loss", "mae", "zeta"]
    expected = sorted([*names, *(f"val_{name}" for name in names)])
    assert list(history.history) == [*expected, "added"]
    assert history.history["added"] == [1.0]
    assert list(recorder.calls[-1][1][0]) == expected  # on_train_end, as in Keras


def test_keys_added_in_other_hooks_go_no_further():
    class Adds(Callback):
        def on_train_batch_end(self, batch, logs):
            logs["batch_key"] = 1.0

        def on_test_batch_end(self, batch, logs):
            logs["test_batch_key"] = 1.0

        def on_test_end(self, logs):
            logs["test_key"] = 1.0

    model = make_model()
    history = model.fit(
        X, Y, batch_size=4, validation_split=0.5, callbacks=Adds(), verbose=0
    )
    names = {"loss", "mae", "val_loss", "val_mae"}
    assert set(history.history) == names
    assert set(model.evaluate(X, Y, callbacks=Adds(), verbose=0)) == {"loss", "mae"}


def test_a_users_callback_runs_before_history():
    seen = []
    model = make_model()
    look = AtEpochEnd(lambda *_: seen.append(dict(model.history.history)))
    model.fit(X, Y, batch_size=4, callbacks=look, verbose=0)
    assert seen == [{}]


# Which epochs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("validation_freq", "expected"),
    [(1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2]), ([1, 4], [0, 3]), ((2,), [1]), ([], [])],
)
def test_validation_is_due_every_so_often_or_after_these_epochs(
    validation_freq, expected
):
    recorder = Recorder()
    make_model().fit(
        X,
        Y,
        batch_size=4,
        epochs=4,
        validation_data=VALIDATION,
        validation_freq=validation_freq,
        callbacks=recorder,
        verbose=0,
    )
    ends = [args for name, args in recorder.calls if name == "on_epoch_end"]
    assert [epoch for epoch, logs in ends if "val_loss" in logs] == expected


@pytest.mark.parametrize(("initial_epoch", "epochs"), [(0, 0), (3, 3), (5, 2)])
def test_no_epoch_is_a_run_all_the_same(initial_epoch, epochs):
    recorder = Recorder()
    history = make_model().fit(
        X,
        Y,
        batch_size=4,
        initial_epoch=initial_epoch,
        epochs=epochs,
        callbacks=recorder,
        verbose=0,
    )
    assert recorder.names() == ["on_train_begin", "on_train_end"]
    assert (history.history, history.epoch) == ({}, [])


def test_epochs_count_from_the_initial_one():
    history = make_model().fit(X, Y, batch_size=4, initial_epoch=2, epochs=4, verbose=0)
    assert history.epoch == [2, 3]
    assert len(history.history["loss"]) == 2


def test_a_users_own_history_goes_on_and_a_new_one_begins_anew():
    model, own = make_model(), History()
    first = model.fit(X, Y, batch_size=4, epochs=2, callbacks=own, verbose=0)
    second = model.fit(X, Y, batch_size=4, callbacks=own, verbose=0)
    assert len(own.history["loss"]) == 3
    assert own.epoch == [0]
    assert len(first.history["loss"]) == 2
    assert len(second.history["loss"]) == 1
    assert model.history is second


# Stopping -------------------------------------------------------------------------


class StopAt(Callback):
    """Stops at the end of a call of training."""

    def __init__(self, batch, stop):
        self._batch = batch
        self._stop = stop

    def on_train_batch_end(self, batch, logs):
        if batch == self._batch:
            self._stop(self)


def set_flag(callback):
    callback.model.stop_training = True


def ask_run(callback):
    callback.run.stop("seen enough")
    callback.run.stop("too late to matter")


@pytest.mark.parametrize("stop", [set_flag, ask_run])
def test_a_stop_in_a_batch_ends_the_epoch_in_order(stop):
    recorder = Recorder()
    model = make_model()
    history = model.fit(
        X,
        Y,
        batch_size=2,
        epochs=3,
        validation_data=VALIDATION,
        callbacks=[StopAt(1, stop), recorder],
        verbose=0,
    )
    names = recorder.names()
    assert names.count("on_train_batch_end") == 2
    assert names[-3:] == ["on_test_end", "on_epoch_end", "on_train_end"]
    assert history.epoch == [0]
    assert "val_loss" in history.history
    assert model.stop_training
    if stop is ask_run:
        assert recorder.run.stop_reason == "seen enough"


@pytest.mark.parametrize("stop", [set_flag, ask_run])
def test_a_stop_at_the_end_of_an_epoch_is_the_last(stop):
    model = make_model()
    callback = AtEpochEnd(lambda callback, _: stop(callback), epoch=1)
    history = model.fit(X, Y, batch_size=4, epochs=9, callbacks=callback, verbose=0)
    assert history.epoch == [0, 1]
    again = model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    assert again.epoch == [0, 1]
    assert not model.stop_training


def test_the_flag_stops_the_fit_even_after_an_evaluation_within_it():
    def act(callback, logs):
        callback.model.evaluate(X, Y, verbose=0)
        callback.model.stop_training = True

    history = make_model().fit(
        X, Y, batch_size=4, epochs=5, callbacks=AtEpochEnd(act), verbose=0
    )
    assert history.epoch == [0]


class InterruptAt(Callback):
    """Ctrl-C in the middle of an epoch."""

    def __init__(self, epoch, hook):
        self.epoch = epoch
        setattr(self, hook, self.interrupt)

    def interrupt(self, *_):
        if self.run.epoch == self.epoch:
            raise KeyboardInterrupt


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_test_batch_begin"])
@pytest.mark.parametrize("epoch", [0, 2])
def test_an_interrupt_ends_the_fit_in_order(hook, epoch):
    recorder = Recorder()
    model = make_model()
    with pytest.raises(KeyboardInterrupt):
        model.fit(
            X,
            Y,
            batch_size=4,
            epochs=5,
            verbose=0,
            validation_data=VALIDATION,
            callbacks=[recorder, InterruptAt(epoch, hook)],
        )
    assert model.history.epoch == list(range(epoch))
    last = {name: values[-1] for name, values in model.history.history.items()}
    assert recorder.calls[-1] == ("on_train_end", [last])
    assert recorder.names().count("on_train_end") == 1
    assert recorder.names().count("on_epoch_end") == epoch
    assert model.fit(X, Y, batch_size=4, verbose=0).epoch == [0]


def test_an_error_of_a_callback_passes_and_train_end_does_not_come():
    def fail(*_):
        raise ZeroDivisionError("mine")

    recorder = Recorder()
    with pytest.raises(ZeroDivisionError, match="mine"):
        make_model().fit(
            X, Y, batch_size=4, callbacks=[recorder, AtEpochEnd(fail)], verbose=0
        )
    assert recorder.names()[-1] == "on_epoch_end"


# Losses that are no numbers -------------------------------------------------------


@pytest.mark.parametrize("updates", [1, 2, 5])
def test_the_update_after_which_the_loss_is_no_number_is_named(updates):
    x, y = torch.cat([X] * 5), torch.cat([Y] * 5)
    x[26] = math.inf  # in the update of samples 24 to 27
    model = make_model(IPUConfig(device_iterations=updates))
    with pytest.warns(NonFiniteLossWarning, match=r"is (inf|nan) .* at update 6\. "):
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_reported_and_not_hidden(bad):
    x = X.clone()
    x[5] = bad
    with pytest.warns(NonFiniteLossWarning, match="epoch 1") as caught:
        history = make_model().fit(x, Y, batch_size=4, shuffle=False, verbose=0)
    assert not math.isfinite(history.history["loss"][0])
    assert not math.isfinite(history.history["mae"][0])
    assert {warning.filename for warning in caught} == {__file__}
