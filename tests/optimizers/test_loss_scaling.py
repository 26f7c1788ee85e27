# SPDX-License-Identifier: Apache-2.0
"""A loss scaling that grows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipufit import ConfigError
from ipufit.optimizers import LossScaleRamp


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
