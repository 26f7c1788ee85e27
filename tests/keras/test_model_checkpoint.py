# SPDX-License-Identifier: Apache-2.0
"""`ModelCheckpoint` and Keras's over random series."""

from __future__ import annotations

import keras
import pytest

from ipufit.callbacks import ModelCheckpoint
from tests.keras.scenarios import SEEDS, both, draw_checkpoint, rng_of


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def pair(arguments):
    path = arguments.pop("filepath")
    mine = ModelCheckpoint(f"{path}.safetensors", **arguments)
    theirs = keras.callbacks.ModelCheckpoint(
        f"{path}.weights.h5", save_weights_only=True, **arguments
    )
    return mine, theirs


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_files_at_the_same_time(seed):
    rng = rng_of(seed)
    series, arguments = draw_checkpoint(rng)
    mine, theirs = pair(arguments)
    for _ in range(2):  # what was best, and the updates, outlive a run
        both(mine, theirs, series, attributes=("best",), batches=rng.randint(1, 4))


def test_the_series_are_worth_driving():
    fewer, many = 0, 0
    for seed in SEEDS:
        rng = rng_of(seed)
        series, arguments = draw_checkpoint(rng)
        saved = both(*pair(arguments), series, batches=3).saved
        fewer += 0 < len(saved) < len(series)
        many += len(saved) > len(series)
    assert fewer > 50
    assert many > 20
