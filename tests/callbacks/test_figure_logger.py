# SPDX-License-Identifier: Apache-2.0
"""What loggers share: which calls and epochs they write."""

from __future__ import annotations

import pytest

from ipufit import ConfigError
from ipufit.callbacks import CallbackList
from ipufit.callbacks.figure_logger import FigureLogger


class Noted(FigureLogger):
    """Writes into a list."""

    def __init__(self, update_freq):
        super().__init__(update_freq)
        self.written = []
        self.num_opened = 0

    def open(self):
        self.num_opened += 1

    def write_epoch(self, epoch, logs):
        self.written.append(("epoch", epoch, logs["loss"]))

    def write_updates(self, logs):
        self.written.append((self.updates, logs["loss"]))


def written(update_freq, *, updates_per_call=1, calls=4, epochs=2, state=None):
    noted = Noted(update_freq)
    hooks = CallbackList(noted)
    hooks.on_train_begin({})
    if state is not None:
        hooks.load_state_dict(state)
    for epoch in range(epochs):
        hooks.on_epoch_begin(epoch, {})
        for first in range(0, calls * updates_per_call, updates_per_call):
            hooks.on_train_batch_begin(first, {})
            logs = {"loss": float(first)}
            hooks.on_train_batch_end(first + updates_per_call - 1, logs)
        hooks.on_epoch_end(epoch, {"loss": -1.0})
    assert noted.num_opened == epochs * (1 + calls)
    return [one for one in noted.written if one[0] != "epoch"], noted


def test_epochs_are_always_written_and_calls_only_if_asked_for():
    updates, noted = written("epoch")
    assert updates == []
    assert noted.written == [("epoch", 0, -1.0), ("epoch", 1, -1.0)]


@pytest.mark.parametrize(
    ("update_freq", "updates_per_call", "expected"),
    [
        ("batch", 1, [1, 2, 3, 4, 5, 6, 7, 8]),
        (1, 1, [1, 2, 3, 4, 5, 6, 7, 8]),
        (3, 1, [3, 6]),  # counted over epochs
        (1, 2, [2, 4, 6, 8, 10, 12, 14, 16]),
        (4, 2, [4, 8, 12, 16]),
        (5, 2, [6, 10, 16]),  # after the call that reaches it
        (100, 2, []),
    ],
)
def test_every_so_many_updates(update_freq, updates_per_call, expected):
    updates, noted = written(update_freq, updates_per_call=updates_per_call)
    assert [one[0] for one in updates] == expected
    assert noted.updates == 8 * updates_per_call


def test_counting_goes_on_in_a_resumed_run():
    updates, _ = written(5, epochs=1, state={"0:Noted": {"updates": 7}})
    assert [one[0] for one in updates] == [10]


@pytest.mark.parametrize("update_freq", [0, -1, 1.5, True, "epochs", None])
def test_other_frequencies_are_refused(update_freq):
    with pytest.raises(ConfigError, match="is none of 'epoch', 'batch' and a number"):
        Noted(update_freq)
