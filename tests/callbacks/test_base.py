# SPDX-License-Identifier: Apache-2.0
"""Callbacks, one and many, and functions in the place of their hooks."""

import os
import signal

import pytest
import torch

from ipufit import (
    BackupAndRestore,
    Callback,
    ConfigError,
)
from ipufit.callbacks import (
    CallbackList,
    LambdaCallback,
)
from ipufit.errors import IpufitWarning
from ipufit.state import RunState
from tests.callbacks.driving import linear
from tests.reference import HOOKS


def arguments_of(name):
    return (3, {}) if "batch" in name or "epoch" in name else ({},)


@pytest.mark.parametrize("name", HOOKS)
def test_every_callback_is_called_with_one_shared_dict_in_order(name):
    order = []

    class Adds(Callback):
        def __init__(self, key):
            self._key = key

    def hook(self, *arguments):
        order.append((self._key, list(arguments[-1])))
        arguments[-1][self._key] = 1.0

    setattr(Adds, name, hook)
    everybody = CallbackList([Adds("a"), [Adds("b"), (Adds("c"),)]])
    getattr(everybody, name)(*arguments_of(name))
    assert order == [("a", []), ("b", ["a"]), ("c", ["a", "b"])]


@pytest.mark.parametrize(
    ("first", "second", "raised"),
    [
        (ValueError, OSError, ValueError),
        (ValueError, KeyboardInterrupt, KeyboardInterrupt),
    ],
)
def test_all_are_closed_in_order_though_two_fail(first, second, raised):
    order, errors = [], {"b": first, "c": second}

    class Closes(Callback):
        def __init__(self, key):
            self._key = key

        def close(self):
            order.append(self._key)
            if self._key in errors:
                raise errors[self._key](f"by {self._key}")

    (other,) = {first, second} - {raised}
    with pytest.warns(IpufitWarning, match=other.__name__), pytest.raises(raised):
        CallbackList([Closes(key) for key in "abcd"]).close()
    assert order == ["a", "b", "c", "d"]


KINDS = {"fit": "train", "evaluate": "test", "predict": "predict"}
"""What hooks of a method have in their names."""


def run(model, method, *callbacks):
    x = torch.ones(4, 1)
    data = (x, 4) if method == "predict" else (x, x, 4)
    getattr(model, method)(*data, callbacks=list(callbacks), verbose=0)


@pytest.mark.parametrize(
    ("method", "error"),
    [("fit", ValueError), ("evaluate", KeyboardInterrupt), ("predict", ValueError)],
)
def test_what_fails_first_is_raised_and_not_what_fails_in_closing(method, error):
    class Closes(Callback):
        def close(self):
            raise OSError("by close")

    def fail(*arguments):
        raise error("the first")

    failing = LambdaCallback(**{f"on_{KINDS[method]}_begin": fail})
    with pytest.warns(IpufitWarning, match="OSError: by close"), pytest.raises(
        error, match="the first"
    ):
        run(linear(), method, Closes(), failing)


def test_all_hear_the_end_though_one_fails():
    heard = []

    class Ends(Callback):
        def __init__(self, key):
            self._key = key

        def on_train_end(self, logs):
            heard.append(self._key)
            if self._key == "a":
                raise ValueError("by a")

    hooks = CallbackList([Ends("a"), Ends("b")])
    hooks.set_run(RunState())
    with pytest.raises(ValueError, match="by a"):
        hooks.on_train_end({})
    assert heard == ["a", "b"]


@pytest.mark.parametrize("callbacks", [3, "early", Callback, [Callback], [lambda: 1]])
def test_what_is_no_callback_is_refused(callbacks):
    with pytest.raises(ConfigError, match=r"use ipufit\.Callback"):
        CallbackList(callbacks)


def test_hooks_have_keras_s_old_names_too():
    heard = []

    class Old(Callback):
        def set_params(self, params):
            heard.append(params)

        def on_batch_begin(self, batch, logs):
            heard.append(("begin", batch))

        def on_batch_end(self, batch, logs):
            heard.append(("end", batch, logs))

    hooks = CallbackList([Old()])
    hooks.set_run(RunState(params={"epochs": 1}))
    hooks.on_train_batch_begin(3, {})
    hooks.on_train_batch_end(4, {"loss": 1.0})
    assert heard == [{"epochs": 1}, ("begin", 3), ("end", 4, {"loss": 1.0})]


def test_a_callback_of_a_run_inside_a_run_goes_on_with_the_outer_one():
    class Both(Callback):
        def __init__(self):
            self.epochs, self.closed, self.inside = [], 0, False

        def on_epoch_end(self, epoch, logs):
            self.epochs.append(self.run.epoch)
            if self.model.num_updates < 6:
                self.model.evaluate(x, x, callbacks=[self, other], verbose=0)
                assert self.closed == 0
                assert other.closed == epoch + 1  # which is of the evaluation alone
            if epoch == 1:
                self.run.stop("of the fit")

        def close(self):
            self.closed += 1

    both, other = Both(), Both()
    x = torch.zeros(4, 1)
    model = linear()
    model.fit(x, x, 2, epochs=5, verbose=0, callbacks=both)
    assert both.epochs == [0, 1]
    assert both.closed == 1


def test_sigterm_is_heard_after_an_evaluation_with_the_same_callback(tmp_path):
    class Evaluate(Callback):
        def on_epoch_begin(self, epoch, logs):
            self.model.evaluate(x, x, callbacks=backup, verbose=0)
            os.kill(os.getpid(), signal.SIGTERM)

    x = torch.zeros(4, 1)
    before = signal.getsignal(signal.SIGTERM)
    backup = BackupAndRestore(tmp_path / "run")
    model = linear(device_iterations=1)
    model.fit(x, x, 2, epochs=5, verbose=0, callbacks=[backup, Evaluate()])
    assert model.num_updates == 1
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", [*HOOKS, "on_batch_begin", "on_batch_end"])
def test_every_hook_can_be_a_function(name):
    heard = []
    callback = LambdaCallback(**{name: lambda *arguments: heard.append(arguments)})
    arguments = (3, {}) if "batch" in name or "epoch" in name else ({},)
    for hook in HOOKS:
        given = (3, {}) if "batch" in hook or "epoch" in hook else ({},)
        getattr(CallbackList(callback), hook)(*given)
    assert heard == [arguments]


def test_functions_may_be_given_in_keras_s_order():
    heard = []
    hooks = [lambda *_, name=name: heard.append(name) for name in "abcdef"]
    callback = CallbackList(LambdaCallback(*hooks))
    callback.on_epoch_begin(0, {})
    callback.on_epoch_end(0, {})
    callback.on_train_begin({})
    callback.on_train_end({})
    callback.on_train_batch_begin(0, {})
    callback.on_train_batch_end(0, {})
    assert "".join(heard) == "abcdef"


def test_unknown_hooks_are_refused():
    with pytest.raises(
        ConfigError, match=r"no hook on_epoch_finish\. Hooks are: on_tr"
    ):
        LambdaCallback(on_epoch_finish=print)
    with pytest.raises(ConfigError, match="no hook close"):
        LambdaCallback(close=print)
    with pytest.raises(ConfigError, match="on_epoch_end=3: use a function"):
        LambdaCallback(on_epoch_end=3)


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("on_epoch_ends", "on_epoch_end"),
        ("on_train_bach_end", "on_train_batch_end"),
        ("on_train_epoch_end", "on_epoch_end"),  # Lightning's
        ("on_validation_end", "on_test_end"),
        ("on_step_end", "on_train_batch_end"),  # transformers'
        ("on_fit_start", "on_train_begin"),
    ],
)
def test_a_method_that_is_no_hook_is_said_when_its_class_is_made(name, hook):
    with pytest.warns(IpufitWarning, match=rf"Mine\.{name} is no hook.*{hook}\b"):
        type("Mine", (Callback,), {name: lambda self, *_: None})


@pytest.mark.parametrize("name", [*HOOKS, "on_plateau", "on_tick", "_on_epoch_ends"])
def test_hooks_and_other_methods_are_not(name):
    assert type("Mine", (Callback,), {name: lambda self, *_: None})()
