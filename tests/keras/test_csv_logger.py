# SPDX-License-Identifier: Apache-2.0
"""`CSVLogger` and Keras's write the same bytes."""

from __future__ import annotations

import keras
import pytest

from ipufit.callbacks import CSVLogger
from tests.callbacks.driving import play
from tests.keras.scenarios import (
    SEEDS,
    KerasScriptedModel,
    draw_series,
    play_keras,
    rng_of,
)


def draw(rng):
    """Figures of some epochs; every other run is validated at times."""
    names = rng.sample(["loss", "accuracy", "q", "b c", "z,"], rng.randint(1, 4))
    columns = {name: draw_series(rng) for name in names}
    length = min(map(len, columns.values()))
    series = []
    for epoch in range(length):
        figures = {n: column[epoch] for n, column in columns.items()}
        if rng.random() < 0.3 and series:
            figures.update({f"val_{n}": one for n, one in list(figures.items())})
        series.append({n: one for n, one in figures.items() if one is not None})
    if rng.random() < 0.3:
        series[0][rng.choice(["text", "list"])] = rng.choice(["a b", 'a"b', [1.0, 2]])
    return series


@pytest.mark.parametrize("seed", SEEDS[:100])
def test_the_same_rows(seed, tmp_path):
    rng = rng_of(seed)
    separator = rng.choice([",", ";", "\t"])
    files = tmp_path / "mine.csv", tmp_path / "theirs.csv"
    append = rng.random() < 0.5
    mine = CSVLogger(files[0], separator, append)
    theirs = keras.callbacks.CSVLogger(files[1], separator, append)
    for _ in range(rng.randint(1, 2)):
        series = draw(rng_of(seed))
        # Keras's logs come sorted, and without figures that have no column.
        play(mine, series)
        play_keras(theirs, series, model=KerasScriptedModel())
        assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size > 0
