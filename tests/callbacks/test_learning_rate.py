# SPDX-License-Identifier: Apache-2.0
"""Callbacks that set the learning rate, on a scripted model and in a fit."""

import pytest

from ipufit import ConfigError
from ipufit.callbacks import LearningRateScheduler, ReduceLROnPlateau
from tests.callbacks.driving import ScriptedModel, play


def played_rates(schedule, epochs=3, **arguments):
    played = play(LearningRateScheduler(schedule), [1.0] * epochs, **arguments)
    rates = [logs["learning_rate"] for logs in played.logs]
    assert rates == played.rates
    return rates


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (lambda epoch, lr: lr / 2, [0.5, 0.25, 0.125]),
        (lambda *arguments: arguments[1] * 2, [2.0, 4.0, 8.0]),
    ],
)
def test_anything_that_can_be_called_is_a_schedule(schedule, rates):
    assert played_rates(schedule) == rates


def test_other_groups_keep_their_ratio_across_a_rate_of_zero():
    model = ScriptedModel(rates=(0.1, 0.01, 0.0))
    play(LearningRateScheduler(lambda epoch: epoch / 10), [1.0] * 3, model=model)
    assert model.rates == pytest.approx([0.2, 0.02, 0.0])


@pytest.mark.parametrize(
    "callback",
    [LearningRateScheduler(lambda epoch: 0.1), ReduceLROnPlateau("q", mode="min")],
    ids=lambda callback: type(callback).__name__,
)
def test_a_model_with_a_schedule_is_refused(callback):
    model = ScriptedModel(has_lr_schedule=True)
    with pytest.raises(ConfigError, match=rf"{type(callback).__name__}.*schedule"):
        play(callback, [1.0], model=model)


# `ReduceLROnPlateau`, driven by scripted figures; the rates are Keras's -------------


def test_a_rate_that_is_the_lowest_but_for_rounding_stays(capsys):
    reducing = ReduceLROnPlateau("q", mode="min", patience=0, min_lr=0.01, verbose=1)
    play(reducing, [3.0] * 5, model=ScriptedModel(rates=(1.0,)))
    assert capsys.readouterr().out.count("reducing") == 2  # 0.1, 0.010000000000000002


def test_all_groups_fall_by_the_same_ratio():
    model = ScriptedModel(rates=(1.0, 0.1, 4.0))
    reducing = ReduceLROnPlateau("q", factor=0.5, mode="min", patience=0, min_lr=0.4)
    play(reducing, [3.0] * 3, model=model)
    assert model.rates == pytest.approx([0.4, 0.04, 1.6])
