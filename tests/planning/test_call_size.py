# SPDX-License-Identifier: Apache-2.0
"""The size of a call that is left open: its updates, its passes, and batch sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipufit.batching import BatchPlan, nearest_batch_sizes
from ipufit.model.call_size import (
    MOST_CALL_BYTES,
    MOST_FORWARD_WORK,
    MOST_PASSES,
    MOST_UNKNOWN_PASSES,
    MOST_UPDATES,
    largest_passes_per_call,
    largest_updates_per_call,
)

# Updates: as many as keep to every limit, and no more -----------------------------

numbers = st.integers(1, 3000)


def limits(updates):
    return {f"limit {i}": n for i, n in enumerate(updates)}


@given(st.lists(numbers, min_size=1, max_size=4), st.lists(st.integers(1, 99)))
def test_the_number_keeps_to_all_limits_and_no_larger_one_does(multiples, most):
    value, reason = largest_updates_per_call(limits(multiples), limits(most))

    def keeps(number):
        divides = all(one % number == 0 for one in multiples)
        return divides and number <= min([*most, MOST_UPDATES])

    assert keeps(value)
    assert not any(keeps(n) for n in range(value + 1, MOST_UPDATES + 1))
    assert reason


@pytest.mark.parametrize(
    ("updates", "most", "expected", "reason"),
    [
        (25, {}, 25, "no larger number divides the 25 updates"),
        (1875, {}, 25, "divide the 1875 updates the next is 75, and a call has 64"),
        (937, {}, 1, "divide the 937 updates the next is 937, and"),
        (640, {}, 64, "a call has 64 updates at most"),
        (640, {"64 MiB are enough": 10}, 10, "64 MiB are enough"),
        (640, {"64 MiB are enough": 9}, 8, "the next is 10, and 64 MiB"),
    ],
)
def test_the_reason_names_what_binds(updates, most, expected, reason):
    given_ = {f"the {updates} updates": updates}
    chosen = largest_updates_per_call(given_, most)
    assert chosen.value == expected
    assert reason in chosen.reason


def test_epochs_of_billions_of_samples_have_nearest_batch_sizes():
    found = nearest_batch_sizes(3 * 10**12, BatchPlan(258), BatchPlan)
    assert found == (250, 256, 300, 320)


# Passes: few numbers, little padding, bounded memory ------------------------------

PASSES = st.lists(st.integers(1, 5000), min_size=1, max_size=2)
BYTES = st.one_of(st.none(), st.integers(0, 2**31))


def step(times):
    """The lowest of the three highest bits."""
    return 1 << max(0, times.bit_length() - 3)


def computed(passes, per_call):
    return sum(-(-number // per_call) * per_call for number in passes)


@given(PASSES, BYTES, st.integers(1, 5), st.integers(1, 600))
def test_each_bound_holds(passes, num_bytes, least, most):
    value, reason = largest_passes_per_call(passes, num_bytes, least, most)
    times = value // least
    assert value == least * times
    assert times % step(times) == 0
    assert reason
    if value == least:
        return
    assert value <= most
    assert value * (num_bytes or 0) <= MOST_CALL_BYTES
    assert num_bytes is not None or value <= MOST_UNKNOWN_PASSES
    padding = computed(passes, value) - computed(passes, least)
    assert padding <= sum(passes) / 16


@given(PASSES, st.integers(0, 2**20), st.integers(1, 5))
def test_no_larger_number_keeps_the_bounds(passes, num_bytes, least):
    value, _ = largest_passes_per_call(passes, num_bytes, least)
    larger = value
    allowed = computed(passes, least) + sum(passes) // 16
    while larger < max(passes):
        larger += least * step(larger // least)
        if larger <= MOST_PASSES and larger * num_bytes <= MOST_CALL_BYTES:
            assert computed(passes, larger) > allowed


@given(st.integers(1, 5000), st.integers(0, 2**34), st.integers(1, 5))
def test_a_call_stays_short(passes, work, least):
    value, _ = largest_passes_per_call([passes], 1, least, work_per_pass=work)
    assert value == least or value * work <= MOST_FORWARD_WORK


def test_large_models_get_small_calls():
    value, reason = largest_passes_per_call([5000], 1, work_per_pass=2**30)
    assert value == 6
    assert reason == "calls of 7 would take long with so many weights"
