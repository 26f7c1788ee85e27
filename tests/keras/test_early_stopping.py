# SPDX-License-Identifier: Apache-2.0
"""`EarlyStopping` and Keras's over random series."""

from __future__ import annotations

import keras
import pytest

from ipufit.callbacks import EarlyStopping
from tests.keras.scenarios import SEEDS, both, draw_early_stopping, rng_of

STATE = ("best", "best_epoch", "stopped_epoch", "wait")


@pytest.mark.parametrize("seed", SEEDS)
def test_it_stops_where_keras_stops(seed):
    series, arguments = draw_early_stopping(rng_of(seed))
    mine = EarlyStopping(**arguments)
    theirs = keras.callbacks.EarlyStopping(**arguments)
    both(mine, theirs, series, attributes=STATE)
    both(mine, theirs, series, attributes=STATE)  # every run begins anew


def test_the_series_are_worth_driving():
    lengths = []
    for seed in SEEDS:
        series, arguments = draw_early_stopping(rng_of(seed))
        stopping = keras.callbacks.EarlyStopping(**arguments)
        epochs = both(EarlyStopping(**arguments), stopping, series).epochs
        lengths.append(len(epochs) < len(series))
    assert 50 < sum(lengths) < len(SEEDS) - 50
