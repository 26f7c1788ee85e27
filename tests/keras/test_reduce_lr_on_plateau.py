# SPDX-License-Identifier: Apache-2.0
"""`ReduceLROnPlateau` and Keras's over random series."""

from __future__ import annotations

import keras
import pytest

from ipufit.callbacks import ReduceLROnPlateau
from tests.keras.scenarios import SEEDS, both, draw_reduce_lr, rng_of

STATE = ("best", "wait", "cooldown_counter")


@pytest.mark.parametrize("seed", SEEDS)
def test_the_rates_are_keras_s(seed):
    series, arguments = draw_reduce_lr(rng_of(seed))
    mine = ReduceLROnPlateau(**arguments)
    theirs = keras.callbacks.ReduceLROnPlateau(**arguments)
    for _ in range(2):  # every run begins anew
        both(mine, theirs, series, attributes=STATE)


def test_the_series_are_worth_driving():
    reduced = 0
    for seed in SEEDS:
        series, arguments = draw_reduce_lr(rng_of(seed))
        theirs = keras.callbacks.ReduceLROnPlateau(**arguments)
        reduced += both(ReduceLROnPlateau(**arguments), theirs, series).rates[-1] < 1
    assert 50 < reduced < len(SEEDS) - 50
