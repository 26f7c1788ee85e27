# SPDX-License-Identifier: Apache-2.0
"""`TerminateOnNaN` and `LambdaCallback` beside Keras's, through real fits."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from ipufit.callbacks import LambdaCallback, TerminateOnNaN
from ipufit.errors import NonFiniteLossWarning
from tests.keras.twins import (
    IpufitRecorder,
    KerasRecorder,
    compiled,
    data,
    networks,
)

COMMON = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}
HOOKS = [
    "on_epoch_begin",
    "on_epoch_end",
    "on_train_begin",
    "on_train_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_batch_end",
]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("row", [0, 5, 15])
def test_terminate_on_nan_ends_at_the_same_batch(value, row, capsys):
    model, ipu = compiled(networks())
    x, y = data(16)
    y[row] = value
    validation_data = data(4, seed=1)
    theirs, mine = KerasRecorder(), IpufitRecorder()
    model.fit(
        x,
        y,
        callbacks=[keras.callbacks.TerminateOnNaN(), theirs],
        validation_data=validation_data,
        **COMMON,
    )
    expected = capsys.readouterr().out
    with pytest.warns(NonFiniteLossWarning):
        ipu.fit(
            x,
            y,
            callbacks=[TerminateOnNaN(), mine],
            validation_data=validation_data,
            **COMMON,
        )
    assert capsys.readouterr().out == expected != ""
    assert mine.events == theirs.events


def test_terminate_on_nan_raises_the_same_error():
    model, ipu = compiled(networks())
    x, y = data(8)
    y[0] = np.nan
    with pytest.raises(RuntimeError, match="NaN or Inf loss"):
        model.fit(x, y, callbacks=[keras.callbacks.TerminateOnNaN(True)], **COMMON)
    with pytest.raises(RuntimeError, match="NaN or Inf loss"), pytest.warns(
        NonFiniteLossWarning
    ):
        ipu.fit(x, y, callbacks=[TerminateOnNaN(True)], **COMMON)


def test_functions_are_called_with_the_same_arguments():
    heard = {}
    x, y = data(8)
    kinds = keras.callbacks.LambdaCallback, LambdaCallback
    for kind, fitted in zip(kinds, compiled(networks())):
        events = heard[kind] = []

        def hook(name, events=events):
            def call(*arguments, logs=None):
                *index, given = (*arguments, logs) if logs is not None else arguments
                events.append((name, *index, sorted(given)))

            return call

        callback = kind(**{name: hook(name) for name in HOOKS})
        fitted.fit(x, y, validation_data=(x, y), callbacks=[callback], **COMMON)
    theirs, mine = (heard[kind] for kind in kinds)
    assert mine == theirs
    assert len(mine) > 3 * len(HOOKS)
