# SPDX-License-Identifier: Apache-2.0
"""Scripted series and arguments, drawn by a seed, and a Keras fit without a model."""

from __future__ import annotations

import contextlib
import io
import random
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np

from tests.callbacks.driving import Played, ScriptedModel, play

NAN, INF = float("nan"), float("inf")
SEEDS = range(250)
"""Seeds of the series that are driven without a model."""
PARTS = [SEEDS[part::10] for part in range(10)]
"""The same seeds in ten parts: a test for each would take longer than the series."""


# What is drawn ----------------------------------------------------------------------


def draw_series(rng, *, gaps=True):
    """A figure per epoch: on a grid (ties!), of noise, or falling and then rising.

    NaN, infinities and gaps are thrown in, but not before the first number: what Keras
    makes of those is a deviation.
    """
    length = rng.randint(1, 14)
    kind = rng.choice(["grid", "noise", "dip"])
    if kind == "grid":
        series = [rng.randint(0, 8) / 4 for _ in range(length)]
    elif kind == "noise":
        series = [round(rng.gauss(0, 1), rng.choice([1, 2, 6])) for _ in range(length)]
    else:
        turn, scale = rng.uniform(0, length), rng.choice([0.1, 1.0, 7.3])
        series = [scale * abs(epoch - turn) for epoch in range(length)]
    odd = [NAN, INF, -INF, None] if gaps else [NAN, INF, -INF]
    return [
        rng.choice(odd) if epoch and rng.random() < 0.08 else value
        for epoch, value in enumerate(series)
    ]


def draw_early_stopping(rng):
    arguments = {
        "monitor": "q",
        "mode": rng.choice(["min", "max"]),
        "patience": rng.randint(0, 4),
        "min_delta": rng.choice([0, 0.1, 0.25, -0.25, 1.0]),
        "baseline": rng.choice([None, None, 0.0, 0.5, 1.5]),
        "restore_best_weights": rng.random() < 0.5,
        "start_from_epoch": rng.choice([0, 0, 1, 3]),
        "verbose": rng.choice([0, 1]),
    }
    series = draw_series(rng)
    first = min(arguments["start_from_epoch"], len(series) - 1)
    if series[first] is None or np.isnan(series[first]):
        series[first] = 1.0
    return series, arguments


def draw_reduce_lr(rng):
    arguments = {
        "monitor": "q",
        "mode": rng.choice(["min", "max"]),
        "factor": rng.choice([0.1, 0.2, 0.5, 0.9]),
        "patience": rng.randint(0, 4),
        "min_delta": rng.choice([0, 1e-4, 0.1, 0.25, -0.25]),
        "cooldown": rng.choice([0, 0, 1, 3]),
        "min_lr": rng.choice([0.0, 0.0, 0.01, 0.3]),
        "verbose": rng.choice([0, 1]),
    }
    return draw_series(rng), arguments


def draw_scheduler(rng):
    """A schedule of some shape, of one argument or two; twice the same."""
    rate, factor = rng.choice([1e-3, 0.1, 1.0]), rng.choice([0.0, 0.3, 0.5, 1.5])
    start = rng.randint(0, 4)
    as_rate = rng.choice([float, np.float32, np.float64])
    schedule = rng.choice(
        [
            lambda epoch: as_rate(rate / (epoch + 1)),
            lambda epoch: as_rate(rate if epoch < start else rate * factor),
            lambda epoch, lr: as_rate(lr if epoch < start else lr * factor),
            lambda epoch, lr: as_rate(lr + rate),
            lambda epoch, lr=0.5: as_rate(lr * factor),
        ]
    )
    return draw_series(rng), {"schedule": schedule, "verbose": rng.choice([0, 1])}


def draw_checkpoint(rng):
    only_best = rng.random() < 0.6
    # Keras can't save the best by updates (a deviation).
    save_freq = "epoch" if only_best else rng.choice(["epoch", 1, 2, 3, 5, 8])
    fields = ["{epoch}", "{epoch:02d}-{q:.2f}", "same"]
    if save_freq != "epoch":
        fields = ["{epoch}-{batch}", "e{epoch:03d}b{batch:02d}", "same"]
    arguments = {
        "filepath": rng.choice(fields),
        "monitor": "q",
        "mode": rng.choice(["min", "max"]),
        "save_best_only": only_best,
        "save_freq": save_freq,
        "initial_value_threshold": rng.choice([None, None, 0.5, 1.0]),
        "verbose": rng.choice([0, 1]),
    }
    return draw_series(rng, gaps="{q" not in arguments["filepath"]), arguments


# Playing it to Keras ----------------------------------------------------------------


class KerasScriptedModel:
    """What Keras's callbacks touch of a model; its weights are the epoch's number."""

    def __init__(self, rate=1.0):
        self.optimizer = keras.optimizers.SGD(rate)
        self.stop_training = False
        self.weights = [np.array(-1)]
        self.saved = []

    @property
    def rate(self):
        return float(keras.ops.convert_to_numpy(self.optimizer.learning_rate))

    def get_weights(self):
        return self.weights

    def set_weights(self, weights):
        self.weights = weights

    def save_weights(self, path, overwrite):
        assert overwrite
        self.saved.append(Path(path).name)

    save = save_weights  # of the whole model


def play_keras(callback, series, *, model, batches=0):
    """As `play`, with Keras's hooks."""
    played = Played(run=SimpleNamespace())
    hooks = keras.callbacks.CallbackList([callback], model=model)
    hooks.on_train_begin()
    for epoch, figures in enumerate(series):
        hooks.on_epoch_begin(epoch)
        for batch in range(batches):
            hooks.on_train_batch_begin(batch)
            hooks.on_train_batch_end(batch, dict(figures))
        model.weights = [np.array(epoch)]
        seen = KeepLogs()
        hooks.callbacks.append(seen)
        hooks.on_epoch_end(epoch, figures)
        hooks.callbacks.pop()
        played.epochs.append(epoch)
        played.logs.append(seen.logs)
        played.rates.append(model.rate)
        if model.stop_training:
            break
    hooks.on_train_end()
    return played


class KeepLogs(keras.callbacks.Callback):
    """Keeps what the callbacks before it left in the logs."""

    def on_epoch_end(self, epoch, logs=None):
        self.logs = dict(logs)


# Comparing --------------------------------------------------------------------------


@dataclass
class Outcome:
    """All that a user can see of a run."""

    epochs: list
    logs: list
    rates: list
    weights: list
    saved: list
    said: str
    warned: list
    state: dict = field(default_factory=dict)


def outcome(player, callback, series, model, attributes=(), **arguments):
    """Play a series and gather what came of it."""
    said = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(
        said
    ):
        warnings.simplefilter("always")
        played = player(callback, series, model=model, **arguments)
    return Outcome(
        played.epochs,
        played.logs,
        played.rates,
        [int(weight) for weight in model.weights],
        [plain_name(name) for name in model.saved],
        said.getvalue(),
        [str(w.message) for w in caught if issubclass(w.category, UserWarning)],
        {name: getattr(callback, name) for name in attributes},
    )


def plain_name(name):
    return re.sub(r"\.(safetensors|weights\.h5|keras)", "", name)


def assert_same_outcome(mine, theirs):
    """Equal, but for the digits that Keras's float32 rates lose."""
    assert mine.epochs == theirs.epochs
    assert mine.weights == theirs.weights
    assert mine.saved == theirs.saved
    assert mine.warned == theirs.warned
    assert mine.state.keys() == theirs.state.keys()
    np.testing.assert_allclose(mine.rates, theirs.rates, rtol=1e-6)
    for one, other in zip(mine.logs, theirs.logs):
        assert list(one) == list(other)
        np.testing.assert_allclose(list(one.values()), list(other.values()), rtol=1e-6)
    for name, value in theirs.state.items():
        assert mine.state[name] == value, name
    assert_same_text(mine.said, theirs.said)


def assert_same_text(mine, theirs):
    """The same words and the same numbers, up to float32."""
    number = r"\d+\.\d+(?:e-\d+)?"
    mine, theirs = plain_name(mine), plain_name(theirs)
    assert re.sub(number, "#", mine) == re.sub(number, "#", theirs)
    np.testing.assert_allclose(
        [float(found) for found in re.findall(number, mine)],
        [float(found) for found in re.findall(number, theirs)],
        rtol=1e-6,
    )


def with_loss(series):
    """Logs of epochs; one whose figure is None has a loss only."""
    return [{"loss": 0.5} if q is None else {"loss": 0.5, "q": q} for q in series]


def both(mine, theirs, series, rate=1.0, attributes=(), **arguments):
    """Play a series to an ipufit callback and to Keras's, and compare."""
    series = with_loss(series)
    arguments["attributes"] = attributes
    ours = outcome(play, mine, series, ScriptedModel((rate,)), **arguments)
    keras_s = outcome(play_keras, theirs, series, KerasScriptedModel(rate), **arguments)
    assert_same_outcome(ours, keras_s)
    return ours


def rng_of(seed):
    return random.Random(seed)
