# SPDX-License-Identifier: Apache-2.0
"""`ModelCheckpoint` and Keras's over random series."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import keras
import pytest

from ipufit.callbacks import ModelCheckpoint
from tests.callbacks.driving import ScriptedModel, play
from tests.keras.scenarios import (
    SEEDS,
    KerasScriptedModel,
    assert_same_outcome,
    both,
    draw_checkpoint,
    outcome,
    play_keras,
    rng_of,
    with_loss,
)


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


class WholeCheckpoints(ScriptedModel):
    """Counts whole checkpoints in the place of weights."""

    def checkpoint(self):
        self.saved.append("same")
        return super().checkpoint()


@pytest.mark.parametrize("seed", SEEDS[::5])
def test_whole_checkpoints_at_the_same_time(seed):
    series, arguments = draw_checkpoint(rng_of(seed))
    path = arguments.pop("filepath")
    mine = ModelCheckpoint(path, **arguments)
    theirs = keras.callbacks.ModelCheckpoint(f"{path}.keras", **arguments)
    series = with_loss(series)
    common = {"attributes": ("best",), "batches": 3}
    model = WholeCheckpoints()
    expected = outcome(play_keras, theirs, series, KerasScriptedModel(), **common)
    found = outcome(play, mine, series, model, **common)
    names = sorted(entry.name for entry in Path().iterdir())
    assert names == sorted(set(expected.saved))
    assert len(found.saved) == len(expected.saved)
    assert_same_outcome(replace(found, saved=expected.saved), expected)


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
