# SPDX-License-Identifier: Apache-2.0
"""Figures in logs, and how a run ends; tests/keras has the order of hooks."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from ipufit import Callback, IPUConfig, NonFiniteLossWarning
from ipufit.metrics import FunctionMetric
from tests.reference import AtEpochEnd, Recorder, compiled

X, Y = torch.randn(8, 3), torch.randn(8, 1)
VALIDATION = (torch.randn(6, 3), torch.randn(6, 1))


def make_model(config=None, metrics=("mae",)):
    return compiled(torch.nn.Linear(3, 1), config, loss="mse", metrics=list(metrics))


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


# Stopping -------------------------------------------------------------------------


class StopAt(Callback):
    """Asks the run to stop at the end of a call of training."""

    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_end(self, batch, logs):
        if batch == self.batch:
            self.run.stop("seen enough")
            self.run.stop("too late to matter")


def test_a_stop_with_a_reason_ends_the_epoch_in_order():
    recorder = Recorder()
    model = make_model()
    history = model.fit(
        X,
        Y,
        batch_size=2,
        epochs=3,
        validation_data=VALIDATION,
        callbacks=[StopAt(1), recorder],
        verbose=0,
    )
    names = recorder.names()
    assert names.count("on_train_batch_end") == 2
    assert names[-3:] == ["on_test_end", "on_epoch_end", "on_train_end"]
    assert history.epoch == [0]
    assert "val_loss" in history.history
    assert recorder.run.stop_reason == "seen enough"
    assert model.stop_training
    assert model.fit(X, Y, batch_size=4, epochs=2, verbose=0).epoch == [0, 1]
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


FIRST_NOT_FINITE = {
    "a frame": (
        lambda x, y: (pandas_frame(x), y),
        "`x` has 3 NaN or infinite values in its inputs, the first in row 5 in column "
        "'b': fill them, or leave their rows out. Lower the",
    ),
    "its target": (
        lambda x, y: (pandas_frame(x, y=x[:, 0].numpy()), "y"),
        "3 .* in its inputs, the first in row 5 in column 'b':",
    ),
    "a dict": (
        lambda x, y: ({"input": pandas_frame(x)}, y),
        r"inputs\['input'\], the first in row 5 in column 'b':",
    ),
    "an array": (lambda x, y: (x, y), r"inputs, the first in row 5 at \[1\]:"),
    "a dataset": (
        lambda x, y: (TensorDataset(x, y), None),
        r"inputs, the first in row 5 at \[1\]:",
    ),
    "a part": (
        lambda x, y: (Subset(TensorDataset(x, y), range(4, 8)), None),
        r"3 .* inputs, the first in row 1 at \[1\]:",
    ),
    "targets": (
        lambda x, y: (X, x[:, 1:2]),
        r"2 .* in its targets, the first in row 5 at \[0\]:",
    ),
    "a series": (
        lambda x, y: (X, pandas_frame(x)["b"]),
        "2 .* in its targets, the first in row 5:",
    ),
    "a stream": (
        lambda x, y: (DataLoader(TensorDataset(x, y), 4), None),
        r"probably lost\. Lower the",
    ),
}


def pandas_frame(x, **more):
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(x.numpy(), columns=["a", "b", "c"]).assign(**more)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", FIRST_NOT_FINITE)
def test_the_first_value_that_is_no_number_is_named(name, bad):
    given, message = FIRST_NOT_FINITE[name]
    x = X.clone()
    x[5, 1] = x[7, 1] = x[7, 2] = bad
    data, y = given(x, Y)
    with pytest.warns(NonFiniteLossWarning, match=message):
        make_model().fit(data, y, batch_size=4, shuffle=False, verbose=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_reported_and_not_hidden(bad):
    x = X.clone()
    x[5] = bad
    with pytest.warns(NonFiniteLossWarning, match="epoch 1") as caught:
        history = make_model().fit(x, Y, batch_size=4, shuffle=False, verbose=0)
    assert not math.isfinite(history.history["loss"][0])
    assert not math.isfinite(history.history["mae"][0])
    assert {warning.filename for warning in caught} == {__file__}


def of_validation(model, x, y):
    sets = {"a": (x, y), "b": (X, Y)}
    model.fit(X, Y, 4, epochs=3, validation_data=sets, verbose=0)


EVALUATED = {
    "evaluate": lambda model, x, y: model.evaluate(x, y, verbose=0),
    "a batch": lambda model, x, y: model.test_on_batch(x, y),
    "a validation": of_validation,
}


@pytest.mark.parametrize("name", EVALUATED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["inputs", "targets"])
def test_an_evaluation_warns_once_of_a_loss_that_is_no_number(part, bad, name):
    data = {"inputs": X.clone(), "targets": Y.clone()}
    data[part][5] = bad
    message = rf"The loss of `.+` is \w+\. `.+` has \d .* its {part}, .* row 5 at"
    with pytest.warns(NonFiniteLossWarning, match=message) as caught:
        EVALUATED[name](make_model(), data["inputs"], data["targets"])
    assert [warning.filename for warning in caught] == [__file__]


def test_a_validation_after_a_training_that_lost_the_weights_does_not_warn_again():
    x = X.clone()
    x[5] = math.nan
    model = make_model()
    with pytest.warns(NonFiniteLossWarning) as caught:
        model.fit(x, Y, 4, validation_data=(X, Y), verbose=0)
    assert len(caught) == 1
    with pytest.warns(NonFiniteLossWarning, match="nan. Look for .* in the weights"):
        model.evaluate(X, Y, verbose=0)
