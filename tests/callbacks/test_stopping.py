# SPDX-License-Identifier: Apache-2.0
"""Callbacks that watch a figure: which way is better, and when `fit` ends."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit import Callback, ConfigError
from ipufit.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TerminateOnNaN,
)
from ipufit.errors import NonFiniteLossWarning
from ipufit.metrics import StreamedMetric
from tests.callbacks.driving import linear, play
from tests.reference import Recorder, compiled

pytestmark = pytest.mark.usefixtures("in_tmp_path")

NAN, INF = float("nan"), float("inf")
DIRECTIONS = {"loss": "min", "accuracy": "max", "left_mae": "min", "val_x": "max"}


@pytest.mark.parametrize(
    ("monitor", "expected"),
    [
        ("loss", "min"),
        ("val_loss", "min"),
        ("val_accuracy", "max"),
        ("val_left_mae", "min"),
        ("val_val_x", "max"),  # one val_ only is taken off
        ("val_right_loss", "min"),  # losses need not be listed
        ("val_val_loss", "min"),
    ],
)
def test_directions_come_from_the_metrics(monitor, expected):
    stopping = EarlyStopping(monitor)
    play(stopping, [{monitor: 1.0}], directions=DIRECTIONS)
    assert stopping.direction == expected


def improves(value, reference, mode, min_delta=0.0):
    """Whether a value becomes the best one after another."""
    stopping = EarlyStopping("q", mode=mode, min_delta=min_delta, patience=9)
    play(stopping, [reference, value])
    return stopping.best_epoch == 1 and stopping.best == value


numbers = st.floats(allow_nan=False, width=32)


@given(numbers, numbers, st.floats(0, 1e3))
def test_more_is_to_max_as_less_is_to_min(value, reference, min_delta):
    more = improves(value, reference, "max", min_delta)
    assert more == improves(-value, -reference, "min", min_delta)
    assert not (more and improves(value, reference, "min", min_delta))
    assert not improves(value, value, "max", min_delta)


def make(name, **arguments):
    if name == "ModelCheckpoint":
        return ModelCheckpoint("x.safetensors", save_best_only=True, **arguments)
    return {"EarlyStopping": EarlyStopping, "ReduceLROnPlateau": ReduceLROnPlateau}[
        name
    ](**arguments)


everyone = pytest.mark.parametrize(
    "name", ["EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau"]
)


@everyone
@pytest.mark.parametrize(
    ("directions", "known"),
    [({}, "known: none;"), ({"mae": "min", "loss": "min"}, "known: loss, mae;")],
)
def test_an_unknown_direction_is_refused_at_the_first_value(name, directions, known):
    callback = make(name, monitor="val_q")
    series = [
        {"loss": 1.0},
        {"loss": 1.0, "val_q": 1.0},
    ]  # validated every second epoch
    epochs = []
    with pytest.warns(UserWarning, match="available"), pytest.raises(
        ConfigError, match="mode='min' or mode='max'"
    ) as error:
        play([callback, Counter(epochs)], series, directions=directions)
    assert f"{name}(monitor='val_q')" in str(error.value)
    assert known in str(error.value)
    assert epochs == [0]


class Counter(Callback):
    def __init__(self, epochs):
        self.epochs = epochs

    def on_epoch_end(self, epoch, logs):
        self.epochs.append(epoch)


@everyone
def test_directions_are_looked_up_anew_in_every_run(name):
    callback = make(name, monitor="q")
    play(callback, [1.0], directions={"q": "min"})
    assert callback.direction == "min"
    play(callback, [1.0], directions={"q": "max"})
    assert callback.direction == "max"


# `EarlyStopping`: what Keras has none of; tests/keras has the rest -------------------


def test_the_run_hears_why():
    played = play(EarlyStopping("q", mode="min", patience=2), [1, 2, 3])
    assert played.run.stop_reason == ("q hasn't improved for 2 epochs (EarlyStopping)")


class Largest(StreamedMetric):
    """The largest output."""

    direction = "max"

    def reset(self):
        self.value = float("-inf")

    def update(self, outputs, targets, weights=None):
        self.value = max(self.value, float(outputs.max()))

    def result(self):
        return self.value


@pytest.mark.parametrize("prefix", ["", "val_"])
def test_streamed_metrics_say_which_way_is_better(prefix):
    model = compiled(torch.nn.Linear(2, 1), loss="mse", metrics=[Largest("largest")])
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    stopping = EarlyStopping(f"{prefix}largest", patience=9)
    validation_data = (x, y) if prefix else None
    model.fit(
        x,
        y,
        batch_size=4,
        validation_data=validation_data,
        callbacks=stopping,
        verbose=0,
    )
    assert stopping.direction == "max"


# `TerminateOnNaN`: which losses end a run, and how ----------------------------------


@pytest.mark.parametrize("loss", [NAN, INF, -INF])
def test_a_loss_that_is_no_number_ends_the_run(loss, capsys):
    series = [{"loss": 1.0}, {"loss": loss}, {"loss": 1.0}]
    played = play(TerminateOnNaN(), series, batches=1)
    assert played.epochs == [0, 1]
    assert played.run.stop_reason == f"the loss is {loss} (TerminateOnNaN)"
    assert capsys.readouterr().out == "Batch 0: Invalid loss, terminating training\n"


def test_other_losses_and_none_end_nothing(capsys):
    series = [{"loss": 1e38}, {"loss": -3.0}, {"q": NAN}]
    assert len(play(TerminateOnNaN(), series, batches=2).epochs) == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("raises", [False, True])
def test_a_fit_ends_after_the_call(raises, capsys):
    model = linear(device_iterations=2)
    x = torch.ones(12, 1)
    x[8] = NAN  # in the third update, the first of the second call
    recorder = Recorder()

    def fit():
        model.fit(
            x,
            torch.ones(12, 1),
            batch_size=2,
            epochs=3,
            shuffle=False,
            callbacks=[TerminateOnNaN(raise_error=raises), recorder],
            verbose=0,
        )

    expected = contextlib.nullcontext()
    if raises:
        expected = pytest.raises(RuntimeError, match="it is nan at batch 5 of epoch 1")
    with pytest.warns(NonFiniteLossWarning), expected:
        fit()
    said = "" if raises else "Batch 5: Invalid loss, terminating training\n"
    assert capsys.readouterr().out == said
    names = recorder.names()
    assert names.count("on_train_batch_begin") == 3
    assert names.count("on_train_batch_end") == (2 if raises else 3)
    assert names.count("on_train_end") == (0 if raises else 1)


class Withdrawing(Callback):
    """Stops the run in each call, and withdraws it before the call is over."""

    def on_train_batch_begin(self, batch, logs):
        self.model.stop_training = True
        assert self.model.stop_training

    def on_train_batch_end(self, batch, logs):
        self.model.stop_training = False
        assert not self.model.stop_training


def test_a_stop_can_be_withdrawn_until_the_call_is_over():
    model = compiled(torch.nn.Linear(2, 1), loss="mse")
    x, y = torch.zeros(8, 2), torch.ones(8, 1)
    history = model.fit(x, y, 4, epochs=2, verbose=0, callbacks=Withdrawing())
    assert history.epoch == [0, 1]


class WithdrawingAfterValidation(Callback):
    """Stops the run in its validation, and withdraws it at the end of the epoch."""

    def on_test_batch_end(self, batch, logs):
        self.model.stop_training = True

    def on_epoch_end(self, epoch, logs):
        self.model.stop_training = False
        assert not self.model.stop_training
        assert self.run.stop_reason is None


def test_a_stop_can_be_withdrawn_after_a_validation():
    model = compiled(torch.nn.Linear(2, 1), loss="mse")
    x, y = torch.zeros(8, 2), torch.ones(8, 1)
    stops = WithdrawingAfterValidation()
    data = {"validation_data": (x, y), "callbacks": stops}
    assert model.fit(x, y, 4, epochs=2, verbose=0, **data).epoch == [0, 1]
