# SPDX-License-Identifier: Apache-2.0
"""Callbacks are copied and pickled, before a fit and after it, as Keras's are."""

from __future__ import annotations

import copy
import pickle
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import ipufit.callbacks
from ipufit import CheckpointStore, History, IPUModel, Optimizer
from ipufit.callbacks import Callback
from tests.callbacks.trackers import MLflowDouble, WandbDouble

X, Y = torch.arange(32.0).reshape(16, 2) / 32, torch.arange(16) % 2


def pickled(value):
    return pickle.loads(pickle.dumps(value))


both = pytest.mark.parametrize("copied", [copy.deepcopy, pickled])


def same_rate(epoch, rate):
    return rate


def made(folder):
    """Return an object of every public class of callbacks, by the name of the class."""
    trial = SimpleNamespace(report=max, should_prune=bool)  # functions with names
    arguments = {
        "BackupAndRestore": [folder / "backup"],
        "CSVLogger": [folder / "log.csv"],
        "CallbackList": [[ipufit.callbacks.EarlyStopping("loss")]],
        "LearningRateScheduler": [same_rate],
        "ModelCheckpoint": [folder / "run", "loss"],
        "OptunaPruning": [trial, "loss"],
        "StopAfter": [60],
        "TensorBoard": [folder / "logs"],
        **{name: ["loss"] for name in ("EarlyStopping", "ReduceLROnPlateau")},
    }
    kinds = {name: getattr(ipufit.callbacks, name) for name in ipufit.callbacks.__all__}
    callbacks = {
        name: kind(*arguments.get(name, []))
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, Callback)
        if name != "TensorBoard" or find_spec("tensorboard")
    }
    callbacks["keep"] = ipufit.ModelCheckpoint(folder / "store", "loss", keep=2)
    assert len(callbacks) >= 20
    return callbacks


@pytest.fixture
def callbacks(tmp_path, monkeypatch):
    doubles = {"wandb": WandbDouble(), "mlflow": MLflowDouble()}
    for name, double in {**doubles, "optuna": SimpleNamespace()}.items():
        monkeypatch.setitem(sys.modules, name, double)
    return made(tmp_path)


def fitted(callbacks, *, epochs=2):
    model = IPUModel(torch.nn.Linear(2, 2))
    model.compile(Optimizer("sgd", 0.1, ema_momentum=0.5), "cross_entropy")
    data = (X, Y)
    return model.fit(
        *data, 8, epochs, 0, callbacks, validation_data=data, shuffle=False
    )


def values(callback):
    """Return the arguments and the state of a callback, as text."""
    return f"{callback!r} {callback.state_dict()}"


@both
def test_callbacks_are_copied_before_a_fit_and_after_it(callbacks, copied):
    for callback in callbacks.values():
        assert values(copied(callback)) == values(callback)
    history = fitted(list(callbacks.values()))
    for callback in (history, *callbacks.values()):
        other = copied(callback)
        assert values(other) == values(callback)
        assert other.model is None  # neither it nor its device goes along


@both
def test_a_copy_serves_in_another_fit(callbacks, copied):
    fitted(list(callbacks.values()))
    others = [copied(callback) for callback in callbacks.values()]
    history = fitted(others)
    assert history.epoch == [0, 1]
    stopping = others[list(callbacks).index("EarlyStopping")]
    assert stopping.model is not None
    assert stopping.run.updates == 4


@both
def test_a_history_is_copied_with_its_metrics(copied):
    history = fitted([])
    other = copied(history)
    assert isinstance(other, History)
    assert other.history == history.history
    assert repr(other) == repr(history)


@both
def test_a_store_is_copied(copied, tmp_path):
    store = CheckpointStore(tmp_path / "run", keep_last=2)
    assert copied(store).directory == store.directory
    assert copied(store).all() == []


class Slots(Callback):
    __slots__ = ("kept",)

    def __init__(self):
        super().__init__()
        self.kept = 3


@both
def test_slots_are_copied(copied):
    assert copied(Slots()).kept == 3
