# SPDX-License-Identifier: Apache-2.0
"""The updates of a call: as many as keep to every limit, and no more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipufit.planning.choices import MOST_UPDATES, Limit, chosen_device_iterations

numbers = st.integers(1, 3000)


def limits(updates):
    return [Limit(n, f"limit {i}") for i, n in enumerate(updates)]


@given(st.lists(numbers, min_size=1, max_size=4), st.lists(st.integers(1, 99)))
def test_the_number_keeps_to_all_limits_and_no_larger_one_does(multiples, most):
    value, reason = chosen_device_iterations(limits(multiples), limits(most))

    def keeps(number):
        divides = all(one % number == 0 for one in multiples)
        return divides and number <= min([*most, MOST_UPDATES])

    assert keeps(value)
    assert not any(keeps(n) for n in range(value + 1, MOST_UPDATES + 1))
    assert reason


@given(st.lists(numbers, min_size=1, max_size=3), numbers)
def test_a_further_limit_never_makes_calls_larger(multiples, more):
    before = chosen_device_iterations(limits(multiples), []).value
    assert chosen_device_iterations(limits([*multiples, more]), []).value <= before
    assert chosen_device_iterations(limits(multiples), limits([more])).value <= before


@given(numbers)
def test_calls_that_end_with_every_update_have_one(updates):
    hears = Limit(1, "it hears each update")
    chosen = chosen_device_iterations(limits([updates]), [hears])
    assert chosen.value == 1
    assert updates == 1 or chosen.reason == "it hears each update"


@pytest.mark.parametrize(
    ("updates", "most", "expected", "reason"),
    [
        (25, [], 25, "no larger number divides the 25 updates"),
        (1875, [], 25, "divide the 1875 updates the next is 75, and a call has 64"),
        (937, [], 1, "divide the 937 updates the next is 937, and"),
        (640, [], 64, "a call has 64 updates at most"),
        (640, [Limit(10, "64 MiB are enough")], 10, "64 MiB are enough"),
        (640, [Limit(9, "64 MiB are enough")], 8, "the next is 10, and 64 MiB"),
    ],
)
def test_the_reason_names_what_binds(updates, most, expected, reason):
    given_ = [Limit(updates, f"the {updates} updates")]
    chosen = chosen_device_iterations(given_, most)
    assert chosen.value == expected
    assert reason in chosen.reason
