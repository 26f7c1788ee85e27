# SPDX-License-Identifier: Apache-2.0
"""`MLflowLogger` on a double of mlflow."""

from __future__ import annotations

import sys

import pytest

from ipufit import ConfigError
from ipufit.callbacks import CallbackList, LambdaCallback, MLflowLogger
from tests.callbacks.driving import play
from tests.callbacks.trackers import MLflowDouble


@pytest.fixture
def mlflow(monkeypatch):
    double = MLflowDouble()
    monkeypatch.setitem(sys.modules, "mlflow", double)
    return double


def test_it_begins_and_ends_a_run(mlflow):
    play(MLflowLogger(run_name="n"), [{"loss": 2.0}, {"loss": 1.0}])
    (run,) = mlflow.runs
    assert run.arguments == {"run_name": "n"}
    assert run.logged == [(0, {"loss": 2.0}), (1, {"loss": 1.0})]
    assert run.status == "FINISHED"
    assert mlflow.active is None


def test_calls_are_logged_if_asked_for(mlflow):
    play(MLflowLogger(2), [{"loss": 2.0}], batches=5)
    assert mlflow.runs[0].logged == [
        (2, {"batch_loss": 2.0}),
        (4, {"batch_loss": 2.0}),
        (0, {"loss": 2.0}),
    ]


def test_the_user_s_own_run_is_used_and_left_open(mlflow):
    own = mlflow.start_run()
    logger = MLflowLogger(run_name="n")
    for _ in range(2):
        play(logger, [{"loss": 2.0}])
    assert mlflow.runs == [own]
    assert len(own.logged) == 2
    assert mlflow.active is own
    assert logger.run_id is None


def test_a_resumed_fit_goes_on_with_its_run(mlflow):
    states = play(MLflowLogger(run_name="n"), [1.0, 2.0]).states
    play(MLflowLogger(run_name="n"), [2.0], begin=1, state=states[0])
    assert mlflow.runs[1].arguments == {"run_name": "n", "run_id": "id0"}


def test_a_fit_that_failed_is_a_run_that_failed(mlflow):
    failing = LambdaCallback(on_epoch_end=lambda *_: 1 / 0)
    hooks = CallbackList([MLflowLogger(), failing])
    hooks.on_train_begin({})
    hooks.on_epoch_begin(0, {})
    with pytest.raises(ZeroDivisionError):
        hooks.on_epoch_end(0, {})
    hooks.close()
    assert mlflow.runs[0].status == "FAILED"


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"MLflowLogger needs .* pip install mlflow"):
        MLflowLogger()
