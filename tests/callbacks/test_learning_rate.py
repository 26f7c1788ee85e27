# SPDX-License-Identifier: Apache-2.0
"""Callbacks that set the learning rate, on a scripted model and in a fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ipufit import ConfigError, IPUModel
from ipufit.callbacks import LearningRateScheduler, ReduceLROnPlateau
from tests.callbacks.driving import ScriptedModel, play


def played_rates(schedule, epochs=3, **arguments):
    played = play(LearningRateScheduler(schedule), [1.0] * epochs, **arguments)
    rates = [logs["learning_rate"] for logs in played.logs]
    assert rates == played.rates
    return rates


def with_optional_rate(epoch, rate=7.0):
    return rate / 2


class Schedule:
    def __call__(self, epoch, lr):
        return lr / 2


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (lambda epoch, rate: rate / 2, [0.5, 0.25, 0.125]),
        (lambda epoch: 1 / (epoch + 1), [1.0, 0.5, 1 / 3]),
        (with_optional_rate, [0.5, 0.25, 0.125]),
        (Schedule(), [0.5, 0.25, 0.125]),
        (Schedule().__call__, [0.5, 0.25, 0.125]),
        (lambda *arguments: arguments[1] * 2, [2.0, 4.0, 8.0]),
        (lambda epoch, rate: np.float32(0.5), [0.5] * 3),
        (lambda epoch, rate: np.float64(0.5), [0.5] * 3),
    ],
)
def test_the_schedule_sets_the_rate_of_each_epoch(schedule, rates):
    assert played_rates(schedule) == rates


def test_other_groups_keep_their_ratio_across_a_rate_of_zero():
    model = ScriptedModel(rates=(0.1, 0.01, 0.0))
    play(LearningRateScheduler(lambda epoch: epoch / 10), [1.0] * 3, model=model)
    assert model.rates == pytest.approx([0.2, 0.02, 0.0])


def test_without_a_ratio_all_groups_get_the_rate():
    model = ScriptedModel(rates=(0.0, 0.0))
    play(LearningRateScheduler(lambda epoch: 0.5), [1.0], model=model)
    assert model.rates == [0.5, 0.5]


@pytest.mark.parametrize("rate", [1, None, "0.1", True, torch.tensor(0.1), [0.1]])
def test_a_rate_that_is_no_float_is_refused(rate):
    with pytest.raises(ConfigError, match=r"function should be a float\. Got: "):
        play(LearningRateScheduler(lambda epoch: rate), [1.0])


def test_a_function_without_a_signature_gets_both():
    # `min` has none in any Python up to 3.14.
    assert played_rates(lambda epoch, rate: min(epoch, rate) / 1.0) == [0.0, 0.0, 0.0]
    assert LearningRateScheduler(min)._takes_rate


@pytest.mark.parametrize(
    "callback",
    [LearningRateScheduler(lambda epoch: 0.1), ReduceLROnPlateau("q", mode="min")],
    ids=lambda callback: type(callback).__name__,
)
def test_a_model_with_a_schedule_is_refused(callback):
    model = ScriptedModel(has_lr_schedule=True)
    with pytest.raises(ConfigError, match=rf"{type(callback).__name__}.*schedule"):
        play(callback, [1.0], model=model)


def test_a_fit_trains_with_the_rates_of_the_schedule():
    module = torch.nn.Linear(2, 1)
    model = IPUModel(module)
    model.compile("sgd", "mse")
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    rates = [0.1, 0.0, 0.2]
    reference = torch.nn.Linear(2, 1)
    reference.load_state_dict(module.state_dict())
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=3,
        callbacks=LearningRateScheduler(lambda epoch: rates[epoch]),
        verbose=0,
    )
    assert history.history["learning_rate"] == rates
    for rate in rates:
        step = torch.optim.SGD(reference.parameters(), lr=rate)
        torch.nn.functional.mse_loss(reference(x), y).backward()
        step.step()
        step.zero_grad()
    torch.testing.assert_close(module.weight, reference.weight)


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


def test_a_figure_that_is_missing_warns_but_the_rate_is_reported():
    reducing = ReduceLROnPlateau("q", mode="min", patience=0)
    with pytest.warns(UserWarning, match="Available metrics are: loss,learning_rate.$"):
        played = play(reducing, [{"loss": 1.0}])
    assert played.logs == [{"loss": 1.0, "learning_rate": 1.0}]


def test_a_fit_goes_on_with_the_lower_rate():
    def final_weights(callbacks, rates):
        torch.manual_seed(0)
        module = torch.nn.Linear(2, 1)
        model = IPUModel(module)
        model.compile(torch.optim.SGD(module.parameters(), lr=rates[0]), "mse")
        for epoch, rate in enumerate(rates):
            model.optimizer.param_groups[0]["lr"] = rate
            history = model.fit(
                *data,
                batch_size=4,
                initial_epoch=epoch if len(rates) > 1 else 0,
                epochs=epoch + 1 if len(rates) > 1 else 3,
                callbacks=callbacks,
                shuffle=False,
                verbose=0,
            )
        return history, model.get_weights()

    data = torch.randn(8, 2), torch.randn(8, 1)
    reducing = ReduceLROnPlateau("loss", 0.5, patience=0, mode="max", min_delta=9.0)
    history, reduced = final_weights([reducing], [0.1])
    _, by_hand = final_weights([], [0.1, 0.1, 0.05])
    assert history.history["learning_rate"] == [0.1, 0.1, 0.05]
    for mine, expected in zip(reduced, by_hand):
        assert mine == pytest.approx(expected)
