# SPDX-License-Identifier: Apache-2.0
"""Histograms of the weights, for TensorBoard and Weights & Biases."""

from __future__ import annotations

import math
import os
import sys

import numpy as np
import pytest
import torch

from ipufit import ConfigError, IPUModel, TensorBoard, WandbLogger
from ipufit.callbacks import LambdaCallback
from tests.callbacks.trackers import TensorBoardDouble, WandbDouble


@pytest.fixture
def board(monkeypatch):
    double = TensorBoardDouble()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", double)
    return double


@pytest.fixture
def wandb(monkeypatch):
    double = WandbDouble()
    monkeypatch.setitem(sys.modules, "wandb", double)
    return double


class Odd(torch.nn.Module):
    """Has batch norm, buffers that are not finite, and one of float16."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("nothing", torch.full((2,), math.nan))
        self.register_buffer("small", torch.ones(2, dtype=torch.float16))

    def forward(self, x):
        return self.body(x)


NAMES = [
    *("mask", "small", "body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"),
    *("body.1.running_mean", "body.1.running_var"),
]


def fit(callback, epochs=3):
    """The state after each epoch, beside what the callback writes."""
    model, states = IPUModel(Odd()), []
    model.compile("sgd", "mse")
    look = LambdaCallback(on_epoch_end=lambda *_: states.append(model.copied_weights()))
    x = torch.rand(8, 2)
    model.fit(
        x, torch.rand(8, 3), 4, epochs=epochs, verbose=0, callbacks=[callback, look]
    )
    return states


def test_tensorboard_gets_the_weights_of_the_end_of_an_epoch(board):
    states = fit(TensorBoard(histogram_freq=1))
    folder = os.path.join("logs", "train")
    assert [(where, tag, step) for where, tag, _, step in board.histograms] == [
        (folder, name.replace(".", "/"), epoch) for epoch in range(3) for name in NAMES
    ]
    for _, tag, values, epoch in board.histograms:
        expected = states[epoch][tag.replace("/", ".")].float().reshape(-1).numpy()
        np.testing.assert_array_equal(values, expected[np.isfinite(expected)])
        assert values.dtype == np.float32


def test_wandb_gets_them_with_the_figures_of_the_epoch(wandb):
    states = fit(WandbLogger(histogram_freq=1))
    (run,) = wandb.runs
    for epoch, logged in enumerate(run.logged):
        assert logged["epoch/epoch"] == epoch
        weights = [name for name in logged if name.startswith("weights/")]
        assert weights == [f"weights/{name}" for name in NAMES]
        expected = states[epoch]["body.0.weight"].reshape(-1).tolist()
        assert logged["weights/body.0.weight"] == expected
    assert len(run.logged) == 3


def test_they_are_written_every_so_many_epochs(board, wandb):
    fit(TensorBoard(histogram_freq=2), epochs=5)
    assert sorted({step for *_, step in board.histograms}) == [0, 2, 4]
    fit(WandbLogger("batch", histogram_freq=3), epochs=5)
    logged = wandb.runs[-1].logged
    epochs = [one["epoch/epoch"] for one in logged if "weights/mask" in one]
    assert epochs == [0, 3]


@pytest.mark.parametrize("kind", [TensorBoard, WandbLogger])
def test_without_the_argument_no_weights_are_fetched(board, wandb, monkeypatch, kind):
    model = IPUModel(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
    monkeypatch.setattr(IPUModel, "copied_weights", None)
    model.fit(torch.rand(4, 2), torch.rand(4, 1), 2, verbose=0, callbacks=kind())
    assert board.histograms == []


@pytest.mark.parametrize("freq", [-1, 0.5, True, None, "epoch"])
@pytest.mark.parametrize("kind", [TensorBoard, WandbLogger])
def test_other_frequencies_are_refused(board, wandb, kind, freq):
    with pytest.raises(ConfigError, match="histogram_freq="):
        kind(histogram_freq=freq)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:pkg_resources is deprecated:UserWarning")
def test_real_files_have_them(tmp_path):
    pytest.importorskip("tensorboard")
    fit(TensorBoard(tmp_path, histogram_freq=1), epochs=1)
    assert list((tmp_path / "train").iterdir())
