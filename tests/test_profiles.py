# SPDX-License-Identifier: Apache-2.0
"""Examples of properties: the same every day, others on request, each repeatable."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import is_thorough
from tests.strategies import examples, spread


@pytest.fixture
def share(request):
    """Examples of a hundred that the profile asks for."""
    if is_thorough(request.config):
        return 100
    is_quick = request.config.getoption("hypothesis_profile") == "quick"
    return 10 if is_quick else 25


@pytest.mark.spread
def test_examples_are_drawn_anew_only_on_request(share):
    assert settings().max_examples == share
    assert settings().derandomize is (share < 100)
    assert settings().print_blob
    assert settings().deadline is None


@pytest.mark.spread
def test_costly_properties_get_their_share_of_examples(share):
    assert examples(60) == {100: 60, 25: 15, 10: 6}[share]
    assert examples(3) == (3 if share == 100 else 1)


@pytest.mark.spread
def test_costly_cases_are_spread_evenly(share):
    cases = list(range(10))
    assert spread(cases) == {100: cases, 25: [0, 4, 8, 9], 10: [0, 9]}[share]
    assert spread(cases[:1]) == [0]
    assert spread([]) == []


@pytest.mark.thorough
def test_costly_tests_are_for_the_thorough_profile(share):
    assert share == 100


@given(st.integers())
def test_each_example_begins_with_the_same_random_numbers(number):
    assert torch.initial_seed() == 0
    torch.rand(3)
    torch.manual_seed(number % 2**32)
