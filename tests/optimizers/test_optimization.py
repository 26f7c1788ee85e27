# SPDX-License-Identifier: Apache-2.0
"""What sets the values of an optimiser between updates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit import ConfigError
from ipufit.optimizers import LossScaleRamp, Optimizer, Schedule, resolve_optimization


@pytest.fixture
def module():
    return torch.nn.Linear(3, 2)


@pytest.mark.parametrize("per_call", [1, 3])
def test_a_ramp_rises_with_the_updates_over_all_fits(module, per_call):
    ramp = LossScaleRamp(2, factor=2, every_updates=4, maximum=16)
    optimization = resolve_optimization(
        Optimizer("adam", loss_scaling=ramp), None, module
    )
    seen = []
    for _ in range(2):
        optimization.begin_fit(None, per_call)
        for _ in range(5):
            optimization.before_call()
            seen.append(optimization.optimizer.loss_scaling)
            optimization.after_call(per_call)
    assert seen == [ramp.value(call * per_call) for call in range(10)]
    assert max(seen) == (8 if per_call == 1 else 16)


def test_a_fixed_loss_scaling_set_by_hand_stays(module):
    optimization = resolve_optimization(
        Optimizer("adam", loss_scaling=2.0), None, module
    )
    optimization.optimizer.loss_scaling = 4.0
    optimization.begin_fit(None, 1)
    optimization.before_call()
    assert optimization.optimizer.loss_scaling == 4.0


def test_data_of_unknown_length_need_a_total(module):
    optimization = resolve_optimization("adam", "cosine", module)
    with pytest.raises(ConfigError, match=r"length of the data is unk.*total_updates"):
        optimization.begin_fit(None, 1)
    with pytest.raises(ConfigError, match="total_updates"):
        optimization.before_call()
    resolve_optimization("adam", Schedule("cosine", total_updates=5), module).begin_fit(
        None, 1
    )
    resolve_optimization("adam", "inverse_sqrt", module).begin_fit(None, 1)


def test_calls_outside_a_fit_go_on_counting(module):
    schedule = Schedule("exponential", gamma=0.5)
    optimization = resolve_optimization(Optimizer("sgd", 1.0), schedule, module)
    rates = []
    for _ in range(3):
        optimization.before_call()
        rates.append(optimization.optimizer.param_groups[0]["lr"])
        optimization.after_call(1)
    assert rates == [1.0, 0.5, 0.25]


# A loss scaling that grows ----------------------------------------------------------


@given(
    st.floats(2**-4, 2**10),
    st.floats(1.01, 8),
    st.integers(1, 50),
    st.floats(1, 2**15),
    st.integers(0, 500),
)
def test_a_ramp_is_a_loop_that_multiplies(initial, factor, every, times, update):
    ramp = LossScaleRamp(initial, factor, every, initial * times)
    expected = initial
    for _ in range(update // every):
        expected = min(ramp.maximum, expected * factor)
    assert ramp.value(update) == pytest.approx(expected, rel=1e-9)
    assert initial <= ramp.value(update) <= ramp.maximum


def test_a_ramp_stays_at_its_maximum_for_ever():
    assert LossScaleRamp(1, 2.0, 1, 2**20).value(10**9) == 2**20
    assert LossScaleRamp(8, 2.0, 1, 8).value(10**9) == 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 2, 1, 8), "initial=0: use a number above 0"),
        ((1, 1, 1, 8), "factor=1: use a number above 1"),
        ((1, 2, 0, 8), "every_updates=0: use a whole number"),
        ((1, 2, 1.5, 8), r"every_updates=1\.5"),
        ((1, 2, 1, float("inf")), "maximum=inf"),
        ((16, 2, 1, 8), "maximum=8, which is less than initial=16"),
    ],
)
def test_bad_values_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        LossScaleRamp(*values)
