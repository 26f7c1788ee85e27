# SPDX-License-Identifier: Apache-2.0
"""`TensorBoard`: folders, tags and steps, on a double of the writer; and histograms."""

import math
import os
import sys

import numpy as np
import pytest
import torch

from ipufit import ConfigError, IPUConfig, IPUModel
from ipufit.callbacks import LambdaCallback, TensorBoard, WandbLogger
from tests.callbacks.trackers import TensorBoardDouble, WandbDouble


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


# Histograms of the weights, for Weights & Biases too --------------------------------


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


def states_of_fit(callback, epochs=3):
    """The state after each epoch, beside what the callback writes."""
    model, states = IPUModel(Odd()), []
    model.compile("sgd", "mse")
    look = LambdaCallback(on_epoch_end=lambda *_: states.append(model.copied_weights()))
    x = torch.rand(8, 2)
    model.fit(
        x, torch.rand(8, 3), 4, epochs=epochs, verbose=0, callbacks=[callback, look]
    )
    return states


def test_tensorboard_gets_the_weights_of_the_end_of_an_epoch(double):
    states = states_of_fit(TensorBoard(histogram_freq=1))
    folder = os.path.join("logs", "train")
    assert [(where, tag, step) for where, tag, _, step in double.histograms] == [
        (folder, name.replace(".", "/"), epoch) for epoch in range(3) for name in NAMES
    ]
    for _, tag, values, epoch in double.histograms:
        expected = states[epoch][tag.replace("/", ".")].float().reshape(-1).numpy()
        np.testing.assert_array_equal(values, expected[np.isfinite(expected)])
        assert values.dtype == np.float32


def test_wandb_gets_them_with_the_figures_of_the_epoch(wandb):
    states = states_of_fit(WandbLogger(histogram_freq=1))
    (run,) = wandb.runs
    for epoch, logged in enumerate(run.logged):
        assert logged["epoch/epoch"] == epoch
        weights = [name for name in logged if name.startswith("weights/")]
        assert weights == [f"weights/{name}" for name in NAMES]
        expected = states[epoch]["body.0.weight"].reshape(-1).tolist()
        assert logged["weights/body.0.weight"] == expected
    assert len(run.logged) == 3


def test_they_are_written_every_so_many_epochs(double, wandb):
    states_of_fit(TensorBoard(histogram_freq=2), epochs=5)
    assert sorted({step for *_, step in double.histograms}) == [0, 2, 4]
    states_of_fit(WandbLogger("batch", histogram_freq=3), epochs=5)
    logged = wandb.runs[-1].logged
    epochs = [one["epoch/epoch"] for one in logged if "weights/mask" in one]
    assert epochs == [0, 3]


@pytest.mark.parametrize("freq", [-1, True, "epoch"])
@pytest.mark.parametrize("kind", [TensorBoard, WandbLogger])
def test_other_frequencies_are_refused(double, wandb, kind, freq):
    with pytest.raises(ConfigError, match="histogram_freq="):
        kind(histogram_freq=freq)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:pkg_resources is deprecated:UserWarning")
def test_settings_go_by_keyword_because_keras_has_another_order():
    with pytest.raises(TypeError, match="positional"):
        TensorBoard("logs", 1)


def test_real_files_have_them(tmp_path):
    pytest.importorskip("tensorboard")
    states_of_fit(TensorBoard(tmp_path, histogram_freq=1), epochs=1)
    assert list((tmp_path / "train").iterdir())
