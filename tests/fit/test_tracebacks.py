# SPDX-License-Identifier: Apache-2.0
"""Tracebacks show the user's lines, and little else."""

from __future__ import annotations

import sys
import traceback

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ipufit
from ipufit import ConfigError, DataError, IPUConfig, IPUModel
from tests.reference import compiled, samples

X, Y = samples(32)


class Net(nn.Module):
    def __init__(self, act=torch.relu):
        super().__init__()
        self.a, self.act = nn.Linear(X.shape[1], 16), act
        self.b = nn.Linear(12, 3)

    def forward(self, x):
        return self.b(self.act(self.a(x)))


class Rows(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("row 5 is bad")
        return X[index], Y[index]


class Failing(ipufit.Callback):
    def on_epoch_end(self, epoch, logs):
        raise LookupError("nothing there")


class Evaluating(ipufit.Callback):
    def on_epoch_end(self, epoch, logs):
        self.model.evaluate(X, Y[:3], verbose=0)


def own_loss(outputs, targets):
    return (outputs - targets.reshape(2, -1)).square()


def own_metric(outputs, targets):
    return outputs.argmax(-1).no_such_thing


def own_step(module, batch):
    x, y = batch
    return nn.functional.cross_entropy(module(x[:, 1:]), y)


def batches():
    yield X[:8], Y[:8]
    raise KeyError("the stream")


def own_rate(epoch, rate):
    return rate / 0


def branching(x):
    return x if x.sum() > 0 else -x


def fit(x=X, y=Y, **more):
    return lambda: compiled().fit(x, y, batch_size=8, verbose=0, **more)


def fit_compiled(module=None, **settings):
    model = IPUModel(module or nn.Linear(X.shape[1], 3))
    model.compile(**{"loss": "cross_entropy", **settings})
    return model.fit(X, Y, batch_size=8, verbose=0)


def shown(error):
    """The frames, and the lines, that Python prints of an error."""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    frames = traceback.extract_tb(error.__traceback__)
    return frames, lines.splitlines()


IN_CODE_OF_USERS = {
    "forward": lambda: fit_compiled(Net()),
    "branching": lambda: fit_compiled(Net(branching)),
    "own_loss": lambda: fit_compiled(loss=own_loss),
    "own_metric": lambda: fit_compiled(metrics=[own_metric]),
    "own_step": lambda: fit_compiled(loss=None, step=own_step),
    "__getitem__": fit(Rows(), None),
    "batches": lambda: compiled().fit(batches(), steps_per_epoch=4, verbose=0),
    "own_rate": fit(callbacks=[ipufit.LearningRateScheduler(own_rate)]),
    "on_epoch_end": fit(callbacks=[Failing()]),
}
IN_OURS = {
    "arguments": fit(epoch=2),
    "values": fit(epochs="two"),
    "data": fit(X, Y[:3]),
    "names": lambda: compiled().compile(loss="crossentropi"),
    "config": lambda: IPUConfig(replicas=0),
    "shapes": lambda: compiled().predict(X[:, 1:], verbose=0),
    "stream": lambda: list(compiled().predict(X[:, 1:], stream=True, verbose=0)),
}


@pytest.mark.parametrize("name", IN_CODE_OF_USERS)
def test_an_error_in_the_users_code_ends_at_the_users_line(name):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any class
        IN_CODE_OF_USERS[name]()
    frames, lines = shown(caught.value)
    assert (frames[-1].filename, frames[-1].name) == (__file__, name)
    others = [frame for frame in frames if frame.filename != __file__]
    assert len(others) <= (sys.version_info < (3, 11))
    assert len(lines) <= 20
    assert sum(line.startswith("Traceback") for line in lines) == 1


def test_an_error_in_a_call_of_the_users_code_ends_there():
    with pytest.raises(DataError, match="different numbers of samples") as caught:
        fit(callbacks=[Evaluating()])()
    assert shown(caught.value)[0][-1].name == "on_epoch_end"


@pytest.mark.parametrize("name", IN_OURS)
def test_an_error_of_ipufit_ends_at_one_line_of_ipufit(name):
    with pytest.raises((TypeError, ValueError)) as caught:
        IN_OURS[name]()
    frames, lines = shown(caught.value)
    *users, last = (frame.filename == __file__ for frame in frames)
    assert not last
    assert users.count(False) <= (sys.version_info < (3, 11))
    assert len(lines) <= 20


@pytest.mark.parametrize(
    "data",
    [
        lambda: compiled(config=IPUConfig(num_workers=1)).fit(Rows(), verbose=0),
        lambda: compiled().fit(DataLoader(Rows(), 8, num_workers=1), verbose=0),
    ],
)
def test_an_error_in_a_data_worker_shows_the_users_line(data):
    try:  # `pytest.raises` would keep the frame that has the workers
        data()
        lines = []
    except ValueError as error:
        _, lines = shown(error)
    assert lines[-2:] == ["ValueError: row 5 is bad", ""]
    assert len(lines) <= 20
    assert any("in __getitem__" in line for line in lines)
    assert not any("_worker_loop" in line for line in lines)


def test_an_error_keeps_the_users_own_cause():
    def act(x):
        try:
            return x[{}["left"]]
        except KeyError as error:
            raise RuntimeError("no side") from error

    with pytest.raises(DataError, match="no side") as caught:
        fit_compiled(Net(act))
    _, lines = shown(caught.value)
    assert "KeyError: 'left'" in lines
    assert "RuntimeError: no side" in lines
    assert sum("in act" in line for line in lines) == 2
    assert not any("site-packages" in line for line in lines)


def test_causes_that_have_no_line_of_the_user_s_show_no_frames():
    class Retrying(ipufit.Callback):
        def on_epoch_end(self, epoch, logs):
            try:
                self.model.evaluate(X, Y[:3], verbose=0)
            except DataError:
                self.model.predict(X[:, 1:], verbose=0)

    with pytest.raises(DataError) as caught:
        fit(callbacks=[Retrying()])()
    _, lines = shown(caught.value)
    assert "mat1 and mat2" in "".join(lines)
    assert sum(" File " in line and __file__ not in line for line in lines) <= (
        2 * (sys.version_info < (3, 11))
    )

    with pytest.raises(ipufit.FileError) as caught:
        compiled().save("/proc/none/run")
    _, lines = shown(caught.value)
    assert sum(" File " in line and "ipufit" in line for line in lines) <= (
        2 + (sys.version_info < (3, 11))
    )
    assert isinstance(caught.value.__cause__, OSError)


def raise_anew(error):
    raise ConfigError(str(error)).with_traceback(error.__traceback__) from error


def raise_in_turn(error):
    try:
        raise ConfigError(f"again: {error}") from error
    except ConfigError as other:
        raise error from other


@pytest.mark.parametrize("raise_again", [raise_anew, raise_in_turn])
def test_errors_may_share_their_tracebacks_and_be_causes_of_each_other(raise_again):
    def fail(x):
        raise ValueError("fails")

    def act(x):
        try:
            fail(x)
        except ValueError as error:
            raise_again(error)

    with pytest.raises(ValueError, match="fails") as caught:
        fit_compiled(Net(act))
    names = [frame.name for frame in shown(caught.value)[0]]
    assert names.count("fail") == 1
    assert raise_again.__name__ in names


def test_all_frames_are_there_if_they_are_asked_for(monkeypatch):
    monkeypatch.setenv("IPUFIT_TRACEBACK", "full")
    with pytest.raises(DataError) as caught:
        fit_compiled(Net())
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert len(shown(caught.value)[1]) > 50


def test_the_error_that_was_repeated_stays_within_reach():
    with pytest.raises(DataError) as caught:
        fit_compiled(Net())
    assert isinstance(caught.value.__context__, RuntimeError)


@pytest.mark.parametrize("index", [0, 1, 3])
def test_a_layer_of_the_wrong_size_is_named(index):
    widths = [X.shape[1], 7, 7, 5, 3]
    layers = [nn.Linear(*pair) for pair in zip(widths, widths[1:])]
    layers[index] = nn.Linear(20, widths[index + 1])
    module = nn.Sequential(nn.Sequential(*layers[:2]), *layers[2:])
    name = f"0.{index}" if index < 2 else str(index - 1)
    said = (
        f"in `{name}`, Linear(20, {widths[index + 1]}), which got [8, {widths[index]}]"
    )
    with pytest.raises(DataError) as caught:
        fit_compiled(module)
    assert said in str(caught.value)
    with pytest.raises(DataError) as caught:
        fit_compiled(
            module,
            loss=None,
            step=lambda module, batch: module(batch[0]).square().mean(),
        )
    assert said in str(caught.value)


def test_other_layers_are_named_as_torch_does():
    module = nn.Sequential(nn.Unflatten(1, (1, -1)), nn.Conv1d(3, 4, 2))
    with pytest.raises(DataError, match=r"in `1`, Conv1d\(3, 4, kernel_size=\(2,\)"):
        fit_compiled(module)


def test_settings_that_contradict_each_other_are_of_one_line():
    with pytest.raises(ConfigError) as caught:
        compiled().compile(loss="mse", step=own_step)
    assert len(shown(caught.value)[0]) <= 2 + (sys.version_info < (3, 11))
