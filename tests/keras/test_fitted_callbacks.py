# SPDX-License-Identifier: Apache-2.0
"""A sample of the scripted series through real fits, in Keras and in ipufit."""

from __future__ import annotations

import io
import warnings
from contextlib import chdir, redirect_stdout

import keras
import pytest
from safetensors.torch import load_file

from ipufit.callbacks import (
    EarlyStopping,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
)
from tests.keras.scenarios import (
    assert_same_text,
    draw_checkpoint,
    draw_early_stopping,
    draw_reduce_lr,
    draw_scheduler,
    plain_name,
    rng_of,
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

SAMPLE = range(1000, 1006)
KINDS = IpufitInject, KerasInject


@pytest.fixture
def fit_both(tmp_path):
    """Fit both with a series put into the logs; compare all that there is to see."""

    def fit_both(mine, theirs, series):
        pair = compiled(networks())
        x, y = data(8)
        common = {
            "batch_size": 4,
            "epochs": len(series),
            "shuffle": False,
            "verbose": 0,
        }
        said, histories = [], []
        for fitted, inject, callback in zip(pair, KINDS[::-1], (theirs, mine)):
            folder = tmp_path / inject.__name__
            folder.mkdir()
            out = io.StringIO()
            with redirect_stdout(out), chdir(folder), warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*available", UserWarning)
                callbacks = [inject(series), callback]
                histories.append(fitted.fit(x, y, callbacks=callbacks, **common))
            said.append(out.getvalue())
        assert histories[1].epoch == histories[0].epoch
        assert_same_history(histories[1].history, histories[0].history)
        assert_same_weights(pair[1].module, pair[0])
        assert_same_text(said[1], said[0])
        return pair

    return fit_both


@pytest.mark.parametrize("seed", SAMPLE)
def test_early_stopping(seed, fit_both):
    series, arguments = draw_early_stopping(rng_of(seed))
    mine, theirs = (
        kind(**arguments) for kind in (EarlyStopping, keras.callbacks.EarlyStopping)
    )
    fit_both(mine, theirs, series)
    assert mine.best_epoch == theirs.best_epoch


@pytest.mark.parametrize("seed", SAMPLE)
def test_reduce_lr_on_plateau(seed, fit_both):
    series, arguments = draw_reduce_lr(rng_of(seed))
    fit_both(
        ReduceLROnPlateau(**arguments),
        keras.callbacks.ReduceLROnPlateau(**arguments),
        series,
    )


@pytest.mark.parametrize("seed", SAMPLE)
def test_learning_rate_scheduler(seed, fit_both):
    series, arguments = draw_scheduler(rng_of(seed))
    series = series[:4]  # some of the schedules grow
    fit_both(
        LearningRateScheduler(**arguments),
        keras.callbacks.LearningRateScheduler(**arguments),
        series,
    )


@pytest.mark.parametrize("seed", SAMPLE)
def test_model_checkpoint(seed, fit_both, tmp_path):
    series, arguments = draw_checkpoint(rng_of(seed))
    path = arguments.pop("filepath")
    theirs = keras.callbacks.ModelCheckpoint(
        f"made/{path}.weights.h5", save_weights_only=True, **arguments
    )
    mine = ModelCheckpoint(f"made/{path}.safetensors", **arguments)
    model, ipu = fit_both(mine, theirs, series)
    my_files, their_files = (
        sorted((tmp_path / kind.__name__).rglob("*.*")) for kind in KINDS
    )
    assert [plain_name(path.name) for path in my_files] == [
        plain_name(path.name) for path in their_files
    ]
    for my_file, their_file in zip(my_files, their_files):
        ipu.module.load_state_dict(load_file(my_file))
        model.load_weights(their_file)
        assert_same_weights(ipu.module, model)
