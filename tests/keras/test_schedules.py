# SPDX-License-Identifier: Apache-2.0
"""Schedules by name against Keras's of the same formula."""

from __future__ import annotations

import pytest

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
    ],
    ids=["cosine", "warm cosine", "polynomial", "linear", "exponential", "restarts"],
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
