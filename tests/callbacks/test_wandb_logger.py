# SPDX-License-Identifier: Apache-2.0
"""`WandbLogger` on a double of wandb."""

from __future__ import annotations

import sys

import pytest

from ipufit import ConfigError
from ipufit.callbacks import CallbackList, LambdaCallback, WandbLogger
from tests.callbacks.driving import play
from tests.callbacks.trackers import WandbDouble


@pytest.fixture
def wandb(monkeypatch):
    double = WandbDouble()
    monkeypatch.setitem(sys.modules, "wandb", double)
    return double


def test_it_begins_and_finishes_a_run(wandb):
    play(WandbLogger(project="p", name="n"), [{"loss": 2.0}, {"loss": 1.0}])
    (run,) = wandb.runs
    assert run.arguments == {"project": "p", "name": "n"}
    assert run.logged == [
        {"epoch/epoch": 0, "epoch/loss": 2.0},
        {"epoch/epoch": 1, "epoch/loss": 1.0},
    ]
    assert run.exit_code == 0
    assert wandb.run is None


def test_calls_are_logged_if_asked_for(wandb):
    play(WandbLogger("batch"), [{"loss": 2.0}], batches=2)
    assert wandb.runs[0].logged == [
        {"batch/updates": 1, "batch/loss": 2.0},
        {"batch/updates": 2, "batch/loss": 2.0},
        {"epoch/epoch": 0, "epoch/loss": 2.0},
    ]


def test_the_user_s_own_run_is_used_and_left_open(wandb):
    own = wandb.init(project="mine")
    logger = WandbLogger(project="p")
    for _ in range(2):
        play(logger, [{"loss": 2.0}])
    assert wandb.runs == [own]
    assert len(own.logged) == 2
    assert own.exit_code is None
    assert logger.run_id is None


def test_every_fit_has_its_own_run(wandb):
    logger = WandbLogger()
    for _ in range(2):
        play(logger, [1.0])
    assert [run.id for run in wandb.runs] == ["id0", "id1"]


def test_a_resumed_fit_goes_on_with_its_run(wandb):
    states = play(WandbLogger(project="p"), [1.0, 2.0]).states
    play(WandbLogger(project="p"), [2.0], begin=1, state=states[0])
    assert wandb.runs[1].arguments == {"project": "p", "id": "id0", "resume": "allow"}


def test_a_fit_that_failed_is_a_run_that_failed(wandb):
    hooks = CallbackList([WandbLogger(), LambdaCallback(on_epoch_end=lambda *_: 1 / 0)])
    hooks.on_train_begin({})
    hooks.on_epoch_begin(0, {})
    with pytest.raises(ZeroDivisionError):
        hooks.on_epoch_end(0, {})
    hooks.close()
    assert wandb.runs[0].exit_code == 1


def test_evaluations_alone_begin_nothing(wandb):
    hooks = CallbackList(WandbLogger())
    hooks.on_test_begin({})
    hooks.on_test_end({"loss": 1.0})
    hooks.close()
    assert wandb.runs == []


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"WandbLogger needs .* pip install wandb"):
        WandbLogger()
