# SPDX-License-Identifier: Apache-2.0
"""`CometLogger` on a double of comet_ml, and on an offline experiment."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from importlib.util import find_spec

import pytest

from ipufit import ConfigError
from ipufit.callbacks import CallbackList, CometLogger, LambdaCallback
from tests.callbacks.driving import play
from tests.callbacks.trackers import CometDouble


@pytest.fixture
def comet(monkeypatch):
    double = CometDouble()
    monkeypatch.setitem(sys.modules, "comet_ml", double)
    return double


def test_it_begins_and_ends_an_experiment(comet):
    logger = CometLogger(project_name="p", parameters={"lr": 0.1})
    play(logger, [{"loss": 2.0}, {"loss": 1.0}], batches=3)
    (experiment,) = comet.experiments
    assert experiment.arguments == {"mode": "create", "project_name": "p"}
    assert experiment.logged == [(3, 0, {"loss": 2.0}), (6, 1, {"loss": 1.0})]
    assert experiment.parameters == [{"lr": 0.1}]  # once, not for every epoch
    assert experiment.tags == []
    assert experiment.ended


def test_calls_are_logged_if_asked_for(comet):
    play(CometLogger(2), [{"loss": 2.0}], batches=5)
    assert comet.experiments[0].logged == [
        (2, None, {"batch_loss": 2.0}),
        (4, None, {"batch_loss": 2.0}),
        (5, 0, {"loss": 2.0}),
    ]


def test_the_user_s_own_experiment_is_used_and_left_open(comet):
    own = comet.start(project_name="mine")
    logger = CometLogger(project_name="p", parameters={"lr": 0.1})
    for _ in range(2):
        play(logger, [{"loss": 2.0}])
    assert comet.experiments == [own]
    assert len(own.logged) == 2
    assert own.parameters == [{"lr": 0.1}, {"lr": 0.1}]
    assert not own.ended
    assert logger.run_id is None


def test_every_fit_has_its_own_experiment(comet):
    logger = CometLogger()
    for _ in range(2):
        play(logger, [1.0])
    assert [one.key for one in comet.experiments] == ["key0", "key1"]


def test_a_resumed_fit_goes_on_with_its_experiment(comet):
    states = play(CometLogger(project_name="p"), [1.0, 2.0]).states
    play(CometLogger(project_name="p"), [2.0], begin=1, state=states[0])
    assert comet.experiments[1].arguments == {
        "mode": "get_or_create",
        "project_name": "p",
        "experiment_key": "key0",
    }


def test_a_fit_that_failed_is_an_experiment_that_failed(comet):
    failing = LambdaCallback(on_epoch_end=lambda *_: 1 / 0)
    hooks = CallbackList([CometLogger(), failing])
    hooks.on_train_begin({})
    hooks.on_epoch_begin(0, {})
    with pytest.raises(ZeroDivisionError):
        hooks.on_epoch_end(0, {})
    hooks.close()
    assert comet.experiments[0].tags == ["failed"]
    assert comet.experiments[0].ended


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(ConfigError, match=r"CometLogger needs .* pip install comet_ml"):
        CometLogger()


# comet_ml itself ----------------------------------------------------------------------

OFFLINE = """
import sys
import comet_ml
from ipufit.callbacks import CallbackList, CometLogger

quiet = comet_ml.ExperimentConfig(
    offline_directory=sys.argv[1], log_env_details=False, log_git_metadata=False,
    log_git_patch=False, log_code=False, display_summary_level=0,
)
logger = CometLogger(
    1, parameters={"lr": 0.5}, online=False, project_name="p", experiment_config=quiet
)
for loss in (2.0, 1.0):
    hooks = CallbackList([logger])
    hooks.on_train_begin({})
    hooks.on_epoch_begin(0, {})
    hooks.on_train_batch_begin(0, {})
    hooks.on_train_batch_end(3, {"loss": 3.0})
    hooks.on_epoch_end(0, {"loss": loss})
    hooks.on_train_end({})
    hooks.close()
"""


@pytest.mark.skipif(find_spec("comet_ml") is None, reason="comet_ml isn't installed")
def test_an_offline_experiment_has_the_figures(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    losses = []
    for path in tmp_path.glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            lines = archive.read("messages.json").decode().splitlines()
        payloads = [json.loads(line)["payload"] for line in lines]
        metrics = [p["metric"] for p in payloads if "metric" in p]
        figures = {
            one["metricName"]: (one["metricValue"], one["step"], one.get("epoch"))
            for one in metrics
            if one["metricName"].endswith("loss")
        }
        losses.append(figures["loss"])
        assert figures["batch_loss"][:2] == (3.0, 4)
        parameters = [p["param"] for p in payloads if "param" in p]
        assert ("lr", 0.5) in [(p["paramName"], p["paramValue"]) for p in parameters]
    assert sorted(losses) == [(1.0, 4, 0), (2.0, 4, 0)]  # an experiment per fit
