# SPDX-License-Identifier: Apache-2.0
"""Schedules by name against Keras's of the same formula."""

import math

import pytest
import torch
from torch.optim import lr_scheduler

from ipufit import IPUModel, LambdaCallback, Optimizer
from ipufit.optimizers import Schedule

keras = pytest.importorskip("keras")
schedules = keras.optimizers.schedules

TOTAL = 40


@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (
            lambda: schedules.CosineDecay(1.0, TOTAL, alpha=0.1),
            Schedule("cosine", final=0.1),
        ),
        (
            lambda: schedules.CosineDecay(
                0.0, TOTAL - 10, warmup_target=1.0, warmup_steps=10
            ),
            Schedule("cosine", warmup_updates=10),
        ),
        (
            lambda: schedules.PolynomialDecay(1.0, TOTAL, 0.05, power=2.0),
            Schedule("polynomial", power=2, final=0.05),
        ),
        (
            lambda: schedules.PolynomialDecay(1.0, TOTAL, 0.0),
            Schedule("linear"),
        ),
        (
            lambda: schedules.ExponentialDecay(1.0, 10, 0.5),
            Schedule("exponential", gamma=0.5, every_updates=10),
        ),
        (
            lambda: schedules.CosineDecayRestarts(1.0, 10, t_mul=1.0, alpha=0.2),
            Schedule("cosine_restarts", cycles=4, final=0.2),
        ),
        (
            lambda: schedules.CosineDecayRestarts(1.0, 7, t_mul=1.0, m_mul=0.5),
            Schedule("cosine_restarts", every_updates=7, m_mul=0.5),
        ),
        (
            lambda: schedules.CosineDecayRestarts(1.0, 4, 2.0, 0.9, 0.1),
            Schedule("cosine_restarts", every_updates=4, t_mul=2, m_mul=0.9, final=0.1),
        ),
        (
            lambda: schedules.InverseTimeDecay(1.0, 10, 0.96),
            Schedule("inverse_time", timescale=10 / 0.96),
        ),
        (
            lambda: schedules.PiecewiseConstantDecay([4, 8], [0.5, 1.0, 0.1]),
            Schedule("step", boundaries=(5, 9), factors=(0.5, 1.0, 0.1)),
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_factors_are_keras_rates(make, schedule):
    rates = [float(make()(update)) for update in range(TOTAL)]
    factors = [schedule.factor(update, TOTAL) for update in range(TOTAL)]
    assert factors == pytest.approx(rates, abs=1e-5)


def test_a_step_falls_one_update_before_keras():
    """As in torch: from the boundary on, where Keras begins after it."""
    keras_steps = schedules.PiecewiseConstantDecay([5], [1.0, 0.1])
    ours = Schedule("step", boundaries=(5,))
    assert [float(keras_steps(update)) for update in (5, 6)] == pytest.approx(
        [1.0, 0.1]
    )
    assert [ours.factor(update) for update in (4, 5)] == pytest.approx([1.0, 0.1])


def torch_schedulers():
    """Schedules of Keras that are torch's, with a base rate of 1."""
    lambdas = lr_scheduler.LambdaLR
    return [
        (
            schedules.ExponentialDecay(1.0, 3, 0.5, staircase=True),
            lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
        ),
        (
            schedules.PolynomialDecay(1.0, 5, 0.1, cycle=True),
            lambda optimizer: lambdas(
                optimizer, lambda k: 1 - 0.9 * k / (5 * max(1, math.ceil(k / 5)))
            ),
        ),
    ]


@pytest.mark.parametrize("index", range(2))
def test_fits_with_torch_s_schedulers_have_keras_rates(index):
    keras_schedule, make = torch_schedulers()[index]
    model = IPUModel(torch.nn.Linear(1, 1))
    rates = []
    model.compile(Optimizer("sgd", 1.0), "mse", lr_schedule=make)
    noted = LambdaCallback(
        on_train_batch_begin=lambda *_: rates.append(model.optimizer.learning_rate)
    )
    zeros = torch.zeros(12, 1)
    model.fit(zeros, zeros, batch_size=1, shuffle=False, verbose=0, callbacks=[noted])
    expected = [float(keras_schedule(update)) for update in range(12)]
    assert rates == pytest.approx(expected, abs=1e-6)
