# SPDX-License-Identifier: Apache-2.0
"""`WandbLogger` and `MLflowLogger` on doubles of their services."""

import os
import sys

import pytest
import torch

from ipufit import (
    ConfigError,
    DroppedRowsWarning,
    IPUConfig,
    IpufitWarning,
    IPUModel,
    poptorch,
)
from ipufit.callbacks import (
    CallbackList,
    LambdaCallback,
    MLflowLogger,
    TensorBoard,
    WandbLogger,
)
from ipufit.metrics import ConfusionMatrix, StreamedFunction
from ipufit.state import RunState
from tests.callbacks.driving import play
from tests.callbacks.trackers import MLflowDouble, TensorBoardDouble, WandbDouble


class Wandb:
    """The service, and what its double has noted, in words of both."""

    logger, module, ends = WandbLogger, "wandb", (0, 1)

    def __init__(self):
        self.resumed = {"id": "id0", "resume": "allow"}
        self.double = WandbDouble()
        self.begin = self.double.init

    def active(self):
        return self.double.run

    def end_of(self, run):
        return run.exit_code

    def logged(self, run):
        return [tuple(one.values()) for one in run.logged]

    def settings(self, run):
        return run.config

    def set_own(self, **settings):
        self.double.run.config.update(settings)


class MLflow:
    logger, module, ends = MLflowLogger, "mlflow", ("FINISHED", "FAILED")

    def __init__(self):
        self.resumed = {"run_id": "id0"}
        self.double = MLflowDouble()
        self.begin = self.double.start_run

    def active(self):
        return self.double.active

    def end_of(self, run):
        return run.status

    def logged(self, run):
        return [(step, *figures.values()) for step, figures in run.logged]

    def settings(self, run):
        whole = {name[: -len(".txt")]: text for name, text in run.texts.items()}
        for name, text in whole.items():
            start = run.data.params[name]
            assert len(start) == 250
            assert start == f"{text[:247]}..."
        return {**run.data.params, **whole}

    def set_own(self, **settings):
        self.double.log_params(settings)


@pytest.fixture(params=[Wandb, MLflow])
def service(request, monkeypatch):
    service = request.param()
    monkeypatch.setitem(sys.modules, service.module, service.double)
    return service


def test_calls_end_where_it_logs(service):
    name = service.logger.__name__
    assert CallbackList([service.logger()]).call_ends() == []
    ends = CallbackList([service.logger(update_freq=50)]).call_ends()
    assert ends == [(50, name)]


def test_it_begins_and_ends_a_run(service):
    play(service.logger(name="n"), [{"loss": 2.0}, {"loss": 1.0}])
    (run,) = service.double.runs
    assert run.arguments == {"name": "n"}
    assert service.logged(run) == [(0, 2.0), (1, 1.0)]
    assert service.end_of(run) == service.ends[0]
    assert service.active() is None


@pytest.mark.parametrize(
    ("name", "epoch", "batch"),
    [
        ("wandb", {"epoch/epoch": 0, "epoch/q": 2.0}, {"batch/updates": 2}),
        ("mlflow", (0, {"q": 2.0}), (2, {"batch_q": 2.0})),
    ],
)
def test_figures_have_the_names_of_their_service(monkeypatch, name, epoch, batch):
    service = {"wandb": Wandb, "mlflow": MLflow}[name]()
    monkeypatch.setitem(sys.modules, name, service.double)
    play(service.logger(2), [2.0], batches=2)
    if name == "wandb":
        batch = {**batch, "batch/q": 2.0}
    assert service.double.runs[0].logged == [batch, epoch]


def test_the_user_s_own_run_is_used_and_left_open(service):
    own = service.begin(name="mine")
    logger = service.logger(name="n")
    for _ in range(2):
        play(logger, [{"loss": 2.0}])
    assert service.double.runs == [own]
    assert len(own.logged) == 2
    assert service.active() is own
    assert logger.run_id is None


def test_every_fit_has_its_own_run_and_a_resumed_one_goes_on_with_its_run(service):
    logger = service.logger(name="n")
    states = play(logger, [1.0, 2.0]).states
    play(logger, [1.0])
    play(service.logger(name="n"), [2.0], begin=1, state=states[0])
    arguments = [run.arguments for run in service.double.runs]
    assert arguments == [{"name": "n"}] * 2 + [{"name": "n", **service.resumed}]


def test_a_fit_that_failed_is_a_run_that_failed(service):
    failing = LambdaCallback(on_epoch_end=lambda *_: 1 / 0)
    hooks = CallbackList([service.logger(), failing])
    hooks.on_train_begin({})
    hooks.on_epoch_begin(0, {})
    with pytest.raises(ZeroDivisionError):
        hooks.on_epoch_end(0, {})
    hooks.close()
    assert service.end_of(service.double.runs[0]) == service.ends[1]


def test_it_says_what_to_install(service, monkeypatch):
    monkeypatch.setitem(sys.modules, service.module, None)
    name = service.logger.__name__
    with pytest.raises(
        ConfigError, match=rf"{name} needs .* pip install {service.module}"
    ):
        service.logger()


# Hyperparameters ----------------------------------------------------------------------


def small_model():
    config = IPUConfig(device_iterations=2, pipeline=["0", "1"])
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    groups = [
        {"params": part.parameters(), "lr": rate}
        for part, rate in zip(module, (0.25, 0.125))
    ]
    model = IPUModel(module, config)
    optimizer = poptorch.optim.AdamW(groups, loss_scaling=2.0)
    metrics = [StreamedFunction(lambda *_: 0.5, "half"), ConfusionMatrix()]
    model.compile(optimizer, "bce", metrics=metrics)
    return model


def fit(model, logger, **arguments):
    x = torch.rand(50, 4)
    with pytest.warns(DroppedRowsWarning):
        model.fit(x, x[:, 0].round(), 8, callbacks=logger, verbose=0, **arguments)


def test_a_run_has_the_hyperparameters_of_its_fit(service):
    model = small_model()
    fit(model, service.logger(2), epochs=2)
    (run,) = service.double.runs
    settings = service.settings(run)
    expected = {
        "optimizer": "AdamW",
        "lr": 0.25,
        "lr/1": 0.125,
        "betas": "[0.9, 0.999]",
        "loss_scaling": 2.0,
        "epochs": 2,
        "batch_size": 8,
        "micro_batch_size": 2,
        "gradient_accumulation": 4,
        "device_iterations": 2,
        "pipeline": "['0', '1']",
        "config": str(model.config),
    }
    assert {name: settings[name] for name in expected} == expected
    x = torch.rand(50, 4)
    assert settings["plan"] == str(model.batch_plan(x, x[:, 0].round(), 8))
    assert {type(value) for value in settings.values()} <= {bool, int, float, str}
    logged = [value for one in service.logged(run) for value in one]
    assert {type(value) for value in logged} == {int, float}  # no matrix


def test_a_long_text_without_a_place_for_artifacts_is_cut(monkeypatch):
    service = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", service.double)

    def no_bucket(*_):
        raise OSError("no bucket")

    monkeypatch.setattr(service.double, "log_text", no_bucket)
    with pytest.warns(
        IpufitWarning, match=r"can't keep plan\.txt: OSError\('no bucket'"
    ):
        fit(small_model(), service.logger())
    (run,) = service.double.runs
    assert run.data.params["plan"].endswith("...")
    assert run.status == "FINISHED"


def test_values_that_a_run_has_stay(service):
    service.begin()
    service.set_own(lr="mine")
    for epochs in (1, 2):
        fit(small_model(), service.logger(), epochs=epochs)
    settings = service.settings(service.double.runs[0])
    assert (settings["lr"], settings["epochs"]) == ("mine", 1)


def test_tensorboard_has_them_beside_the_last_metrics(monkeypatch):
    double = TensorBoardDouble()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", double)
    model = small_model()
    fit(model, TensorBoard("logs"), epochs=2)
    folder = os.path.join("logs", "train")
    assert double.texts[folder, "config"] == f"    {model.config}"
    plan = double.texts[folder, "plan"].splitlines()
    assert plan[0] == "    batch size 8 = micro-batch 2 * gradient accumulation 4"
    ((written_to, settings, metrics, run_name),) = double.hparams
    assert (written_to, run_name) == (folder, ".")
    assert (settings["lr/1"], settings["epochs"]) == (0.125, 2)
    last = model.history.history
    assert metrics == {f"hparam/{name}": last[name][-1] for name in ("half", "loss")}


# Which calls are written ------------------------------------------------------------


def updates_written(service, update_freq, updates_per_call=1, epochs=2):
    """The numbers of updates at which figures of calls were written."""
    logger = service.logger(update_freq)
    hooks, run = CallbackList(logger), RunState()
    hooks.set_run(run)
    hooks.on_train_begin({})
    for epoch in range(epochs):
        hooks.on_epoch_begin(epoch, {})
        for first in range(0, 4 * updates_per_call, updates_per_call):
            hooks.on_train_batch_begin(first, {})
            run.count_call(updates_per_call, samples=0)
            hooks.on_train_batch_end(first + updates_per_call - 1, {"loss": 9.0})
        hooks.on_epoch_end(epoch, {"loss": -1.0})
    logged = service.logged(service.double.runs[0])
    assert [step for step, loss in logged if loss < 0] == list(range(epochs))
    return [step for step, loss in logged if loss > 0]


@pytest.mark.parametrize(
    ("update_freq", "updates_per_call", "expected"),
    [
        ("epoch", 1, []),
        ("batch", 1, [1, 2, 3, 4, 5, 6, 7, 8]),
        (3, 1, [3, 6]),  # counted over epochs
        (5, 2, [6, 10, 16]),  # after the call that reaches it
    ],
)
def test_every_so_many_updates(service, update_freq, updates_per_call, expected):
    assert updates_written(service, update_freq, updates_per_call) == expected


@pytest.mark.parametrize("update_freq", [0, 1.5, True, "epochs"])
def test_other_frequencies_are_refused(service, update_freq):
    with pytest.raises(ConfigError, match=": use 'epoch', 'batch' or a number"):
        service.logger(update_freq)
