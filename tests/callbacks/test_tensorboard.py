# SPDX-License-Identifier: Apache-2.0
"""`TensorBoard`: folders, tags and steps, on a double of the writer."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from ipufit import ConfigError, IPUConfig, IPUModel
from ipufit.callbacks import LambdaCallback, TensorBoard
from tests.callbacks.trackers import TensorBoardDouble

TRAIN, VALIDATION = os.path.join("logs", "train"), os.path.join("logs", "validation")


@pytest.fixture
def double(monkeypatch):
    double = TensorBoardDouble()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", double)
    return double


def model_of(updates_per_call=1):
    model = IPUModel(
        torch.nn.Linear(1, 1), IPUConfig(device_iterations=updates_per_call)
    )
    model.compile(torch.optim.SGD(model.module.parameters(), lr=0.5), "mse")
    return model


def fit(model, callbacks, epochs=2, **arguments):
    x = torch.ones(8, 1)
    return model.fit(
        x, x, batch_size=2, epochs=epochs, callbacks=callbacks, verbose=0, **arguments
    )


def written(double, folder):
    return [(tag, step) for where, tag, _, step in double.scalars if where == folder]


def test_figures_of_epochs(double):
    x = torch.ones(4, 1)
    history = fit(model_of(), TensorBoard(), validation_data=(x, x)).history
    assert written(double, TRAIN) == [
        ("epoch_loss", 0),
        ("epoch_learning_rate", 0),
        ("epoch_loss", 1),
        ("epoch_learning_rate", 1),
    ]
    assert written(double, VALIDATION) == [
        ("evaluation_loss_vs_iterations", 4),
        ("epoch_loss", 0),
        ("evaluation_loss_vs_iterations", 8),
        ("epoch_loss", 1),
    ]
    values = {(*one[:2], one[3]): one[2] for one in double.scalars}
    for epoch in (0, 1):
        assert values[TRAIN, "epoch_loss", epoch] == history["loss"][epoch]
        assert values[TRAIN, "epoch_learning_rate", epoch] == 0.5
        assert values[VALIDATION, "epoch_loss", epoch] == history["val_loss"][epoch]
    assert double.open == []


def test_figures_of_calls(double):
    fit(model_of(updates_per_call=2), TensorBoard("elsewhere", "batch"), epochs=1)
    folder = os.path.join("elsewhere", "train")
    assert written(double, folder)[:2] == [("batch_loss", 2), ("batch_loss", 4)]


def test_figures_of_every_so_many_updates(double):
    fit(model_of(), TensorBoard(update_freq=3))
    calls = [one for one in written(double, TRAIN) if one[0] == "batch_loss"]
    assert calls == [("batch_loss", 3), ("batch_loss", 6)]


def test_an_evaluation_is_written_at_the_updates_made_so_far(double):
    model = model_of()
    x = torch.ones(4, 1)
    model.evaluate(x, x, callbacks=TensorBoard(), verbose=0)
    fit(model, None, epochs=1)
    loss = model.evaluate(x, x, callbacks=TensorBoard(), verbose=0)["loss"]
    assert written(double, VALIDATION) == [
        ("evaluation_loss_vs_iterations", 0),
        ("evaluation_loss_vs_iterations", 4),
    ]
    assert double.scalars[-1][2] == loss
    assert double.open == []


def test_files_are_closed_after_an_error_too(double):
    def fail(epoch, logs):
        assert double.open
        raise ValueError("by the callback")

    with pytest.raises(ValueError, match="by the callback"):
        fit(model_of(), [TensorBoard(), LambdaCallback(on_epoch_end=fail)])
    assert double.open == []


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install ipufit\[tensorboard\]"):
        TensorBoard()
