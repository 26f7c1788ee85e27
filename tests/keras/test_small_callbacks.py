# SPDX-License-Identifier: Apache-2.0
"""`TerminateOnNaN` and `LambdaCallback` beside Keras's, through real fits."""

import keras
import numpy as np
import pytest

from ipufit.callbacks import TerminateOnNaN
from ipufit.errors import NonFiniteLossWarning
from tests.keras.twins import (
    IpufitRecorder,
    KerasRecorder,
    compiled,
    data,
    networks,
)

COMMON = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}


@pytest.mark.parametrize(("row", "value"), [(0, np.nan), (5, np.inf), (15, np.nan)])
def test_terminate_on_nan_ends_at_the_same_batch(row, value, capsys):
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
