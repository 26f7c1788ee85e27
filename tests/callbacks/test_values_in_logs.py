# SPDX-License-Identifier: Apache-2.0
"""Values in the logs that aren't numbers: a user's texts, arrays and other objects."""

from __future__ import annotations

import csv
import json
import sys

import numpy as np
import pytest
import torch

from ipufit import ConfigError, IPUModel, Metric, StreamedMetric, UnsupportedError
from ipufit.callbacks import (
    BackupAndRestore,
    Callback,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    MLflowLogger,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TensorBoard,
    TerminateOnNaN,
    WandbLogger,
)
from ipufit.metrics import ConfusionMatrix
from tests.callbacks.trackers import MLflowDouble, TensorBoardDouble, WandbDouble

X, Y = torch.arange(32.0).reshape(16, 2) / 32, torch.arange(16) % 2
VALUES = {
    "note": "warm-up <b>",
    "per_class": np.array([0.5, 1.0]),
    "matrix": np.zeros((2, 2)),
    "pair": [1.0, 2.0],
    "mapping": {"a": 1},
    "nothing": None,
}
NUMBERS = {"small": np.float32(0.5), "tensor": torch.tensor([2.5])}


class Adds(Callback):
    """Adds values of all kinds to all logs that have metrics."""

    def on_train_batch_end(self, batch, logs):
        logs.update(VALUES, **NUMBERS)

    on_test_batch_end = on_epoch_end = on_train_batch_end

    def on_test_end(self, logs):
        logs.update(VALUES, **NUMBERS)


class Correct(Metric):
    def sums(self, outputs, targets, weights=None):
        correct = outputs.argmax(1).eq(targets).float()
        return torch.stack([correct.sum(), torch.ones_like(correct).sum()])

    def result(self, sums):
        return sums.tolist()


class Share(Correct):
    def result(self, sums):
        return sums[0] / sums[1]


class Largest(StreamedMetric):
    def update(self, outputs, targets, weights=None):
        self.largest = outputs.max()

    def result(self):
        return self.largest

    def reset(self):
        self.largest = torch.tensor(0.0)


def fit(callbacks=(), metrics=(), verbose=0, **arguments):
    model = IPUModel(torch.nn.Linear(2, 2))
    model.compile("sgd", "cross_entropy", metrics=list(metrics))
    data = {"validation_data": (X, Y), **arguments}
    model.fit(X, Y, 8, 2, verbose, callbacks, **data)
    return model


@pytest.mark.parametrize("verbose", [1, 2])
def test_displays_show_the_numbers(verbose, capsys):
    model = fit([Adds(), TerminateOnNaN()], verbose=verbose)
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "val_loss" in line
    ]
    assert len(lines) == 2
    for line in lines:
        text = line.replace(":", "")
        assert "small 0.5000" in text
        assert "tensor 2.5000" in text
        assert not any(name in text for name in VALUES)
    model.evaluate(X, Y, verbose=verbose, callbacks=[Adds()])


def test_loggers_of_figures_leave_them_out(monkeypatch):
    board, wandb, mlflow = TensorBoardDouble(), WandbDouble(), MLflowDouble()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    services = [
        kind(update_freq=1) for kind in (TensorBoard, WandbLogger, MLflowLogger)
    ]
    fit([Adds(), *services])
    names = {tag for _, tag, _, _ in board.scalars}
    names |= {name for figures in wandb.runs[0].logged for name in figures}
    names |= {name for _, figures in mlflow.runs[0].logged for name in figures}
    assert {"epoch_small", "epoch/tensor", "batch_small"} <= names
    assert not any(value in name for name in names for value in VALUES)
    values = [value for *_, value, _ in board.scalars]
    assert {type(value) for value in values} == {float}


def test_csv_files_have_them(tmp_path):
    fit([Adds(), CSVLogger(tmp_path / "log.csv")])
    with (tmp_path / "log.csv").open(newline="") as file:
        row = next(csv.DictReader(file))
    assert row["note"] == "warm-up <b>"
    assert row["per_class"] == '"[0.5, 1.0]"'
    assert row["tensor"] == '"[2.5]"'


def test_a_history_shows_them():
    history = fit([Adds()]).history
    assert history.history["note"] == ["warm-up <b>"] * 2
    assert "small 0.5" in repr(history)
    assert "note" not in repr(history)
    html = history._repr_html_()
    assert "<td>warm-up &lt;b&gt;</td>" in html
    assert "<td>[0.5 1. ]</td>" in html


@pytest.mark.parametrize("value", [np.array(["a", "b"]), np.array([None]), 1j, {1, 2}])
def test_what_no_checkpoint_can_hold_is_named(value, tmp_path):
    def add(epoch, logs):
        logs["odd"] = value

    callbacks = [LambdaCallback(on_epoch_end=add), BackupAndRestore(tmp_path / "run")]
    words = rf"\['history'\]\['odd'\]\[0\] is a .*{type(value).__name__}, which JSON"
    with pytest.raises(UnsupportedError, match=words):
        fit(callbacks)


def test_a_history_draws_the_numbers():
    pytest.importorskip("matplotlib.pyplot").switch_backend("agg")
    figure = fit([Adds()]).history.plot()
    assert [axes.get_ylabel() for axes in figure.axes] == [
        *("loss", "pair", "small", "tensor")
    ]


@pytest.mark.parametrize("kind", [EarlyStopping, ReduceLROnPlateau, ModelCheckpoint])
@pytest.mark.parametrize("name", [name for name in VALUES if name != "nothing"])
def test_a_monitor_of_something_else_is_refused_with_its_value(kind, name, tmp_path):
    arguments = {"monitor": name, "mode": "max"}
    if kind is ModelCheckpoint:
        arguments.update(filepath=tmp_path / "best", save_best_only=True)
    with pytest.raises(ConfigError) as caught:
        fit([Adds(), kind(**arguments)])
    message = f"{kind.__name__}(monitor={name!r}): this metric is {VALUES[name]!r}, not"
    assert message in str(caught.value)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_other_types_are_monitored(name):
    stopping = EarlyStopping(name, mode="max")
    fit([Adds(), stopping])
    assert (stopping.best, type(stopping.best)) == (float(NUMBERS[name]), float)


def test_fields_of_a_path_are_numbers_and_texts(tmp_path):
    path = f"{tmp_path}/{{note}}-{{small:.2f}}-{{tensor:.1f}}.safetensors"
    fit([Adds(), ModelCheckpoint(path)])
    assert [each.name for each in tmp_path.iterdir()] == [
        "warm-up <b>-0.50-2.5.safetensors"
    ]
    with pytest.raises(
        ConfigError, match=r"Fields with one number are: epoch, loss, note, small"
    ):
        fit([Adds(), ModelCheckpoint(f"{tmp_path}/{{per_class}}.safetensors")])


def test_values_of_metrics_are_numbers_or_lists(capsys):
    model = fit(
        [EarlyStopping("val_share", mode="max")], [Correct(), Share(), Largest()]
    )
    json.dumps(model.history.history)
    values = model.evaluate(X, Y, verbose=2)
    assert "correct" not in capsys.readouterr().out
    assert {type(values["share"]), type(values["largest"])} == {float}
    assert values["correct"][0] / values["correct"][1] == values["share"]


MONITORS = {
    "early": lambda name, _: EarlyStopping(name, mode="max"),
    "plateau": lambda name, _: ReduceLROnPlateau(name, mode="max"),
    "best": lambda name, folder: ModelCheckpoint(folder / "best", name, 0, True),
    "path": lambda name, folder: ModelCheckpoint(f"{folder}/{{{name}}}.safetensors"),
}


class Begun(Callback):
    def on_train_batch_begin(self, batch, logs):
        raise AssertionError("it trains")


@pytest.mark.parametrize("make", MONITORS.values(), ids=MONITORS)
@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("confusion_matrix", None),
        ("val_confusion_matrix", None),
        ("val_b_m", ["a", "b"]),
    ],
)
def test_a_monitor_of_a_matrix_is_refused_before_the_run(make, name, sets, tmp_path):
    metrics = [ConfusionMatrix(name="m") if sets else ConfusionMatrix(), "accuracy"]
    data = dict.fromkeys(sets, (X, Y)) if sets else (X, Y)
    words = "is a matrix, not one number|Fields with one number are: accuracy, epoch"
    with pytest.raises(ConfigError, match=words) as caught:
        fit([make(name, tmp_path), Begun()], metrics, validation_data=data)
    assert name in str(caught.value)
