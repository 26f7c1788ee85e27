# SPDX-License-Identifier: Apache-2.0
"""The numbers that divide a number are found without going through all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ipufit.batching import BatchPlan
from ipufit.planning.choices import divisors, nearest_batch_sizes


@given(st.integers(0, 400))
def test_they_are_those_that_leave_no_rest(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_epochs_of_billions_of_samples_have_nearest_batch_sizes():
    found = nearest_batch_sizes(3 * 10**12, BatchPlan(258), BatchPlan)
    assert found == (250, 256, 300, 320)
