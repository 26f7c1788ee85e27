# SPDX-License-Identifier: Apache-2.0
"""The same thing twice: networks, optimisers and recorders for Keras and ipufit."""

import re

import keras
import numpy as np
import torch

from ipufit import Callback, IPUConfig, IPUModel
from tests.reference import HOOKS

NUM_FEATURES = 3


def data(count, num_targets=1, seed=0):
    """Features and targets as NumPy arrays, the same for the same seed."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, NUM_FEATURES)).astype("float32")
    return x, generator.normal(size=(count, num_targets)).astype("float32")


def classes(count, num_classes=4, seed=0):
    """Features and classes as NumPy arrays, the same for the same seed."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, NUM_FEATURES)).astype("float32")
    return x, generator.integers(0, num_classes, size=count)


# Networks ---------------------------------------------------------------------------


def networks(num_outputs=1, seed=0):
    """A small network as a Keras model and as a torch module, with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = torch.nn.Sequential(
            torch.nn.Linear(NUM_FEATURES, 5),
            torch.nn.Tanh(),
            torch.nn.Linear(5, num_outputs),
        )
    model = keras.Sequential(
        [
            keras.Input((NUM_FEATURES,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(num_outputs),
        ]
    )
    copy_weights(module, model)
    return model, module


class TwoHeads(torch.nn.Module):
    """One trunk, two outputs; Keras's twin names them `left` and `right`."""

    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(NUM_FEATURES, 4)
        self.left = torch.nn.Linear(4, 1)
        self.right = torch.nn.Linear(4, 2)

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return {"left": self.left(hidden), "right": self.right(hidden)}


def two_heads(seed=0):
    """A network with two named outputs, twice."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = TwoHeads()
    inputs = keras.Input((NUM_FEATURES,))
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    outputs = {
        "left": keras.layers.Dense(1, name="left")(hidden),
        "right": keras.layers.Dense(2, name="right")(hidden),
    }
    model = keras.Model(inputs, outputs)
    copy_weights(module, model)
    return model, module


def copy_weights(module, model):
    """Give a Keras model the weights of a module with the same layers in order."""
    model.set_weights(as_keras(module))


def as_keras(module):
    """A module's weights as Keras stores them: kernels are transposed."""
    weights = module.state_dict().values()
    return [weight.detach().numpy().T.copy() for weight in weights]


def assert_same_weights(module, model, atol=1e-5):
    mine, theirs = as_keras(module), model.get_weights()
    assert len(mine) == len(theirs) > 0
    for one, other in zip(mine, theirs):
        size = max(1.0, np.abs(other).max())  # some schedules make weights grow
        np.testing.assert_allclose(one, other, atol=atol * size)


# Optimisers -------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": (
        lambda: keras.optimizers.SGD(0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ),
    "momentum": (
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    ),
    "adam": (
        lambda: keras.optimizers.Adam(0.01, epsilon=1e-8),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-8),
    ),
}


def compiled(pair, optimizer="sgd", loss="mse", **arguments):
    """Both of a pair, compiled alike: a Keras model and an `IPUModel`."""
    model, module = pair
    make_keras, make_torch = OPTIMIZERS[optimizer]
    model.compile(make_keras(), loss, **arguments)
    ipu = IPUModel(module, IPUConfig(device_iterations=1))
    ipu.compile(make_torch(module.parameters()), loss, **arguments)
    return model, ipu


def assert_same_history(mine, theirs, atol=1e-5):
    """The same figures, in the same order of names."""
    assert list(mine) == list(theirs)
    for name, values in theirs.items():
        np.testing.assert_allclose(
            mine[name], values, rtol=1e-5, atol=atol, err_msg=name
        )


# Callbacks --------------------------------------------------------------------------


def _event(name, *arguments):
    """A hook, its index if it has one, and the names in its logs in order."""
    *index, logs = arguments
    return (name, *index, list(logs))


class KerasRecorder(keras.callbacks.Callback):
    """Remembers every hook that Keras calls."""

    def __init__(self):
        super().__init__()
        self.events = []


class IpufitRecorder(Callback):
    """Remembers every hook that ipufit calls."""

    def __init__(self):
        self.events = []


def _recording(name):
    def hook(self, *arguments, logs=None):
        if logs is not None:  # Keras passes those of batches by name
            arguments = (*arguments, logs)
        self.events.append(_event(name, *arguments))

    return hook


for _name in HOOKS:
    setattr(KerasRecorder, _name, _recording(_name))
    setattr(IpufitRecorder, _name, _recording(_name))


class _Inject:
    """Puts made-up figures into the logs of every epoch."""

    def __init__(self, series, name="q"):
        super().__init__()
        self.series = series
        self.name = name

    def on_epoch_end(self, epoch, logs):
        if self.series[epoch] is not None:
            logs[self.name] = self.series[epoch]


class KerasInject(_Inject, keras.callbacks.Callback):
    """Put first in the list; the callbacks after it see its figures."""


class IpufitInject(_Inject, Callback):
    """The same for ipufit."""


# Fits ----------------------------------------------------------------------------


def fit_both(pair, x, y, **arguments):
    """Fit both with hooks recorded; check that all is the same; return ipufit's."""
    model, ipu = pair
    theirs, mine = KerasRecorder(), IpufitRecorder()
    arguments = {"batch_size": 4, "shuffle": False, "verbose": 0, **arguments}
    expected = model.fit(x, y, callbacks=[theirs], **arguments)
    history = ipu.fit(x, y, callbacks=[mine], **arguments)
    assert history.epoch == expected.epoch
    assert mine.events == theirs.events
    assert len(mine.events) > 1
    assert_same_history(history.history, expected.history)
    assert_same_weights(ipu.module, model)
    return history


# Text -------------------------------------------------------------------------------


def without_times(text):
    """What was printed, without durations and ipufit's lines about compilation."""
    lines = [line for line in text.splitlines() if not line.startswith("Compiled in")]
    return [
        re.sub(r" \d+s - \d+(s|ms|us)/step", " TIME - TIME/step", line)
        for line in lines
    ]
