# SPDX-License-Identifier: Apache-2.0
"""OptunaPruning reports each epoch, and ends the run of a trial that is given up."""

import csv
import sys

import pytest
import torch
import torch.distributed as dist

import ipufit
from ipufit import ConfigError, IPUConfig, IPUModel

optuna = pytest.importorskip("optuna")

X, Y = torch.arange(128.0).reshape(32, 4) / 128, torch.ones(32, 1)


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


class After(optuna.pruners.BasePruner):
    """Gives a trial up once it has reported some values."""

    def __init__(self, number):
        self.number = number

    def prune(self, study, trial):
        return len(trial.intermediate_values) >= self.number


def study(number):
    return optuna.create_study(pruner=After(number))


def fit(trial, monitor="val_loss", *callbacks, **config):
    model = IPUModel(torch.nn.Linear(4, 1), IPUConfig(**config))
    model.compile("sgd", "mse")
    pruning = ipufit.OptunaPruning(trial, monitor)
    run = {"batch_size": 8, "epochs": 4, "validation_data": (X, Y), "verbose": 0}
    try:
        model.fit(X, Y, callbacks=[*callbacks, pruning], **run)
    finally:
        if trial is not None:
            trial.set_user_attr("history", model.history.history)
    return model.history.history[monitor][-1]


class Ended(ipufit.Callback):
    def __init__(self):
        self.hooks = []

    def on_train_end(self, logs):
        self.hooks.append("on_train_end")

    def close(self):
        self.hooks.append("close")


@pytest.mark.parametrize("order", [1, -1])
def test_a_trial_is_pruned_after_the_other_callbacks_have_ended(tmp_path, order):
    ended, path = Ended(), tmp_path / "log.csv"
    files = [ipufit.CSVLogger(path), ipufit.BackupAndRestore(tmp_path / "run"), ended]
    pruned = study(2)
    pruned.optimize(lambda trial: fit(trial, "val_loss", *files[::order]), n_trials=1)
    (trial,) = pruned.trials
    history = trial.user_attrs["history"]
    assert trial.state == optuna.trial.TrialState.PRUNED
    assert trial.intermediate_values == dict(enumerate(history["val_loss"]))
    assert len(history["loss"]) == 2
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["val_loss"]) for row in rows] == history["val_loss"]
    assert ended.hooks == ["on_train_end", "close"]
    # The next trial must not go on with this one.
    assert not [*(tmp_path / "run").glob("*.ckpt"), *(tmp_path / "run").glob("*-*")]


def test_fit_raises_what_optuna_expects():
    trial = study(1).ask()
    with pytest.raises(optuna.TrialPruned, match=r"pruned at epoch 1\.$"):
        fit(trial)
    assert len(trial.user_attrs["history"]["loss"]) == 1


def test_a_trial_that_is_not_pruned_is_trained_to_its_end():
    whole = study(99)
    whole.optimize(fit, n_trials=2)
    for trial in whole.trials:
        assert trial.state == optuna.trial.TrialState.COMPLETE
        assert len(trial.intermediate_values) == 4
        assert trial.value == trial.intermediate_values[3]


def test_a_callback_serves_several_fits():
    model = IPUModel(torch.nn.Linear(4, 1))
    model.compile("sgd", "mse")
    pruning = ipufit.OptunaPruning(study(2).ask(), "loss")
    with pytest.raises(optuna.TrialPruned):
        model.fit(X, Y, epochs=4, verbose=0, callbacks=[pruning])
    pruning.trial = study(9).ask()
    model.evaluate(X, Y, verbose=0, callbacks=[pruning])
    assert len(model.fit(X, Y, verbose=0, callbacks=[pruning]).epoch) == 1


def test_what_can_not_be_reported_is_refused_before_the_run():
    with pytest.raises(ConfigError, match="val_mae"):
        fit(study(1).ask(), "val_mae")
    model = IPUModel(torch.nn.Linear(4, 1))
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="the trial of the study"):
        model.fit(X, Y, verbose=0, callbacks=[ipufit.OptunaPruning(None, "loss")])


def test_a_matrix_is_not_reported():
    model = IPUModel(torch.nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy", metrics=[ipufit.metrics.ConfusionMatrix()])
    pruning = ipufit.OptunaPruning(study(1).ask(), "confusion_matrix")
    with pytest.raises(ConfigError, match=r"OptunaPruning\(.*is a matrix, not one"):
        model.fit(X, torch.arange(32) % 3, verbose=0, callbacks=[pruning])


def test_without_optuna_the_callback_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match="pip install optuna"):
        ipufit.OptunaPruning(None)


def pruned_in_processes():
    torch.manual_seed(1)
    trial = study(3).ask() if dist.get_rank() == 0 else None
    try:
        fit(trial)
    except optuna.TrialPruned as error:
        values = trial and list(trial.storage.get_trial(0).intermediate_values)
        return str(error), values
    return None


@pytest.mark.process
def test_all_processes_end_when_the_first_one_s_trial_is_pruned(pool):
    reason = "Trial was pruned at epoch 3."
    assert pool.run(pruned_in_processes) == [(reason, [0, 1, 2]), (reason, None)]


def test_a_study_of_the_other_direction_is_refused():
    maximizing = optuna.create_study(direction="maximize")
    with pytest.raises(ConfigError, match="'maximize' and would prune its best"):
        fit(maximizing.ask())


def test_a_study_of_several_objectives_is_refused():
    several = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(ConfigError, match=r"2 objectives.* Leave OptunaPruning out"):
        fit(several.ask())
