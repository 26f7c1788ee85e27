# SPDX-License-Identifier: Apache-2.0
"""Which way is better, and did it get better."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipufit import Callback, ConfigError
from ipufit.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
from tests.callbacks.driving import play

NAN, INF = float("nan"), float("inf")
DIRECTIONS = {"loss": "min", "accuracy": "max", "left_mae": "min", "val_x": "max"}


@pytest.mark.parametrize(
    ("monitor", "expected"),
    [
        ("loss", "min"),
        ("val_loss", "min"),
        ("val_accuracy", "max"),
        ("val_left_mae", "min"),
        ("val_val_x", "max"),  # one val_ only is taken off
        ("val_right_loss", "min"),  # losses need not be listed
        ("val_val_loss", "min"),
    ],
)
def test_directions_come_from_the_metrics(monitor, expected):
    stopping = EarlyStopping(monitor)
    play(stopping, [{monitor: 1.0}], directions=DIRECTIONS)
    assert stopping.direction == expected


def improves(value, reference, mode, min_delta=0.0):
    """Whether a value becomes the best one after another."""
    stopping = EarlyStopping("q", mode=mode, min_delta=min_delta, patience=9)
    play(stopping, [reference, value])
    return stopping.best_epoch == 1 and stopping.best == value


@pytest.mark.parametrize(
    ("value", "reference", "direction", "min_delta", "expected"),
    [
        (2.0, 3.0, "min", 0.0, True),
        (2.5, 3.0, "min", 0.5, False),  # strict
        (2.4, 3.0, "min", 0.5, True),
        (0.7, 0.8, "min", 0.1, False),  # float64 leaves 0.7999999999999999
        (3.0, 2.0, "max", 0.5, True),
        (2.5, 2.0, "max", 0.5, False),
        (INF, NAN, "min", 0.0, True),
        (1.0, INF, "min", 0.0, True),
        (NAN, 1.0, "max", 0.0, False),
        (1e39, 1e38, "max", 0.0, True),
        (-1e39, 1e39, "min", 0.0, True),
    ],
)
def test_what_is_an_improvement(value, reference, direction, min_delta, expected):
    assert improves(value, reference, direction, min_delta) is expected


numbers = st.floats(allow_nan=False, width=32)


@given(numbers, numbers, st.floats(0, 1e3))
def test_more_is_to_max_as_less_is_to_min(value, reference, min_delta):
    more = improves(value, reference, "max", min_delta)
    assert more == improves(-value, -reference, "min", min_delta)
    assert not (more and improves(value, reference, "min", min_delta))
    assert not improves(value, value, "max", min_delta)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make(name, **arguments):
    if name == "ModelCheckpoint":
        return ModelCheckpoint("x.safetensors", save_best_only=True, **arguments)
    return {"EarlyStopping": EarlyStopping, "ReduceLROnPlateau": ReduceLROnPlateau}[
        name
    ](**arguments)


everyone = pytest.mark.parametrize(
    "name", ["EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau"]
)


@everyone
@pytest.mark.parametrize(
    ("directions", "known"),
    [({}, "known: none;"), ({"mae": "min", "loss": "min"}, "known: loss, mae;")],
)
def test_an_unknown_direction_is_refused_at_the_first_value(name, directions, known):
    callback = make(name, monitor="val_q")
    series = [
        {"loss": 1.0},
        {"loss": 1.0, "val_q": 1.0},
    ]  # validated every second epoch
    epochs = []
    with pytest.warns(UserWarning, match="available"), pytest.raises(
        ConfigError, match="mode='min' or mode='max'"
    ) as error:
        play([callback, Counter(epochs)], series, directions=directions)
    assert f"{name}(monitor='val_q')" in str(error.value)
    assert known in str(error.value)
    assert epochs == [0]


class Counter(Callback):
    def __init__(self, epochs):
        self.epochs = epochs

    def on_epoch_end(self, epoch, logs):
        self.epochs.append(epoch)


@everyone
def test_directions_may_become_known_while_it_runs(name):
    class Knows(Callback):
        def on_epoch_end(self, epoch, logs):
            self.run.directions["q"] = "max"

    callback = make(name, monitor="q")
    play([Knows(), callback], [1.0, 2.0])
    assert callback.best == 2.0


@everyone
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_mode_that_was_given_never_fails(name, mode):
    callback = make(name, monitor="q", mode=mode)
    play(callback, [1.0, 2.0, 3.0], directions={"q": "min"})
    assert callback.best == (1.0 if mode == "min" else 3.0)


@everyone
def test_directions_are_looked_up_anew_in_every_run(name):
    callback = make(name, monitor="q")
    play(callback, [1.0], directions={"q": "min"})
    assert callback.direction == "min"
    play(callback, [1.0], directions={"q": "max"})
    assert callback.direction == "max"


@everyone
def test_an_unknown_mode_is_taken_as_auto(name):
    with pytest.warns(UserWarning, match="mode 'less' is unknown, fallback to auto"):
        assert make(name, monitor="q", mode="less").mode == "auto"


@pytest.mark.parametrize("make_callback", [EarlyStopping, ReduceLROnPlateau])
def test_the_sign_of_min_delta_does_not_matter(make_callback):
    callback = make_callback("q", mode="min", min_delta=-0.5, patience=3)
    for _ in range(2):  # nor how often it ran
        play(callback, [3.0, 2.6, 2.4])
        assert (callback.best, callback.min_delta) == (2.4, 0.5)


@everyone
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_nan_is_never_the_best(name, mode):
    callback = make(name, monitor="q", mode=mode)
    played = play(callback, [NAN, 3.0, NAN], begin=0)
    assert callback.best == 3.0
    assert len(played.epochs) == 3
