# SPDX-License-Identifier: Apache-2.0
"""`LearningRateScheduler` and Keras's with random schedules."""

from __future__ import annotations

import keras
import pytest

from ipufit.callbacks import LearningRateScheduler
from tests.callbacks.driving import ScriptedModel
from tests.keras.scenarios import (
    SEEDS,
    KerasScriptedModel,
    both,
    draw_scheduler,
    rng_of,
)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_rates_are_keras_s(seed):
    rng = rng_of(seed)
    series, arguments = draw_scheduler(rng)
    both(
        LearningRateScheduler(**arguments),
        keras.callbacks.LearningRateScheduler(**arguments),
        series,
        rate=rng.choice([0.01, 0.1, 1.0]),
    )


@pytest.mark.parametrize("rate", [1, None])
def test_what_is_no_float_is_refused_with_keras_s_words(rate):
    schedulers = keras.callbacks.LearningRateScheduler, LearningRateScheduler
    models = KerasScriptedModel(), ScriptedModel()
    said = []
    for make, model in zip(schedulers, models):
        scheduler = make(lambda epoch: rate)
        scheduler.set_model(model)
        with pytest.raises(ValueError, match="should be a float") as error:
            scheduler.on_epoch_begin(0, {})
        said.append(str(error.value))
    assert said[0] == said[1]
