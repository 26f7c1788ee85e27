# SPDX-License-Identifier: Apache-2.0
"""Our callbacks and Keras's: random series without a model, a sample through fits."""

import io
import warnings
from contextlib import chdir, redirect_stdout
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
from safetensors.torch import load_file

from ipufit import callbacks
from tests.callbacks.driving import ScriptedModel, play
from tests.keras.scenarios import (
    PARTS,
    SEEDS,
    KerasScriptedModel,
    assert_same_outcome,
    assert_same_text,
    both,
    draw_checkpoint,
    draw_early_stopping,
    draw_reduce_lr,
    draw_scheduler,
    draw_series,
    outcome,
    plain_name,
    play_keras,
    rng_of,
    with_loss,
)
from tests.keras.twins import (
    IpufitInject,
    KerasInject,
    assert_same_history,
    assert_same_weights,
    compiled,
    data,
    networks,
)

pytestmark = pytest.mark.usefixtures("in_tmp_path")

DRAWN = {
    "EarlyStopping": draw_early_stopping,
    "ReduceLROnPlateau": draw_reduce_lr,
    "LearningRateScheduler": draw_scheduler,
    "ModelCheckpoint": draw_checkpoint,
}
STATE = {
    "EarlyStopping": ("best", "best_epoch", "stopped_epoch", "wait"),
    "ReduceLROnPlateau": ("best", "wait", "cooldown_counter"),
    "LearningRateScheduler": (),
    "ModelCheckpoint": ("best",),
}
SAMPLE = range(1000, 1004)
KINDS = KerasInject, IpufitInject


def pair_of(name, arguments):
    """A callback of ours and Keras's, with the same arguments."""
    theirs = dict(arguments)
    if name == "ModelCheckpoint":
        path = arguments.pop("filepath")
        theirs.update(filepath=f"{path}.weights.h5", save_weights_only=True)
        arguments["filepath"] = f"{path}.safetensors"
    mine = getattr(callbacks, name)(**arguments)
    return mine, getattr(keras.callbacks, name)(**theirs)


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("seeds", PARTS)
def test_scripted_runs_are_keras_s(name, seeds):
    for rng in map(rng_of, seeds):
        series, arguments = DRAWN[name](rng)
        mine, theirs = pair_of(name, arguments)
        rate = 1.0
        if name == "LearningRateScheduler":
            rate = rng.choice([0.01, 0.1, 1.0])
        common = {"rate": rate, "attributes": STATE[name]}
        for _ in range(2):  # runs begin anew, but for the best that is saved
            both(mine, theirs, series, batches=rng.randint(1, 4), **common)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", DRAWN)
def test_the_series_are_worth_driving(name):
    """Some runs end early, change the rate or save less often, and some do not."""
    changed = 0
    for seed in SEEDS:
        series, arguments = DRAWN[name](rng_of(seed))
        model = ScriptedModel()
        played = play(pair_of(name, arguments)[0], with_loss(series), model=model)
        count = len(model.saved) if name == "ModelCheckpoint" else len(played.epochs)
        changed += count < len(series) or played.rates[-1] != 1
    assert len(SEEDS) / 5 < changed
    assert changed < len(SEEDS) * 4 / 5 or name not in list(DRAWN)[:2]


class WholeCheckpoints(ScriptedModel):
    """Counts whole checkpoints in the place of weights."""

    def checkpoint(self, *, copied=True):
        self.saved.append("same")
        return super().checkpoint(copied=copied)


@pytest.mark.parametrize("seed", SEEDS[::5])
def test_whole_checkpoints_at_the_same_time(seed):
    series, arguments = draw_checkpoint(rng_of(seed))
    path = arguments.pop("filepath")
    mine = callbacks.ModelCheckpoint(path, **arguments)
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


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("seed", SAMPLE)
def test_a_fit_with_it_is_keras_s(name, seed):
    series, arguments = DRAWN[name](rng_of(seed))
    if name == "LearningRateScheduler":
        series = series[:4]  # some of the schedules grow
    mine, theirs = pair_of(name, arguments)
    model, ipu = compiled(networks())
    x, y = data(8)
    common = {"batch_size": 4, "epochs": len(series), "shuffle": False, "verbose": 0}
    said, histories = [], []
    for fitted, inject, callback in zip((model, ipu), KINDS, (theirs, mine)):
        Path(inject.__name__).mkdir()
        out = io.StringIO()
        with redirect_stdout(out), chdir(inject.__name__), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*available", UserWarning)
            hooks = [inject(series), callback]
            histories.append(fitted.fit(x, y, callbacks=hooks, **common))
        said.append(out.getvalue())
    assert histories[1].epoch == histories[0].epoch
    assert_same_history(histories[1].history, histories[0].history)
    assert_same_weights(ipu.module, model)
    assert_same_text(said[1], said[0])
    files = [sorted(Path(kind.__name__).rglob("*.*")) for kind in KINDS]
    their_names, my_names = ([plain_name(one.name) for one in some] for some in files)
    assert my_names == their_names
    for their_file, my_file in zip(*files):
        ipu.module.load_state_dict(load_file(my_file))
        model.load_weights(their_file)
        assert_same_weights(ipu.module, model)


@pytest.mark.parametrize("rate", [1, None])
def test_what_is_no_float_is_refused_with_keras_s_words(rate):
    said = []
    for kind, model in (
        (keras.callbacks.LearningRateScheduler, KerasScriptedModel()),
        (callbacks.LearningRateScheduler, ScriptedModel()),
    ):
        scheduler = kind(lambda epoch: rate)
        scheduler.set_model(model)
        with pytest.raises(ValueError, match="should be a float") as error:
            scheduler.on_epoch_begin(0, {})
        said.append(str(error.value))
    assert said[0] == said[1]


# `CSVLogger` writes the same bytes ----------------------------------------------------


def draw_figures(rng):
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
        values = ["a b", 'a"b', [1.0, 2], np.float32(0.5), np.array(0.5), np.eye(2)]
        series[0][rng.choice(["text", "list"])] = rng.choice(values)
    return series


@pytest.mark.parametrize("seeds", PARTS)
def test_csv_loggers_write_the_same_rows(seeds):
    for seed in seeds:
        rng = rng_of(seed)
        arguments = rng.choice([",", ";", "\t"]), rng.random() < 0.5
        files = Path(f"mine-{seed}.csv"), Path(f"theirs-{seed}.csv")
        mine = callbacks.CSVLogger(files[0], *arguments)
        theirs = keras.callbacks.CSVLogger(files[1], *arguments)
        for _ in range(rng.randint(1, 2)):
            series = draw_figures(rng_of(seed))
            # Keras's logs come sorted, and without figures that have no column.
            play(mine, series)
            play_keras(theirs, series, model=KerasScriptedModel())
            assert files[0].read_bytes() == files[1].read_bytes()
        assert files[0].stat().st_size > 0
