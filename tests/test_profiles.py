# SPDX-License-Identifier: Apache-2.0
"""Examples of properties: the same every day, others on request, each repeatable."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import examples, spread


@pytest.fixture
def is_thorough(request):
    option = request.config.getoption
    profile = option("hypothesis_profile")
    return profile == "thorough" or (not profile and option("hypothesis_seed"))


def test_examples_are_drawn_anew_only_on_request(is_thorough):
    assert settings().derandomize is not bool(is_thorough)
    assert settings().print_blob
    assert settings().max_examples == (100 if is_thorough else 25)
    assert settings().deadline is None


def test_costly_properties_get_their_share_of_examples(is_thorough):
    assert examples(60) == (60 if is_thorough else 15)
    assert examples(3) == (3 if is_thorough else 1)


def test_costly_cases_are_spread_evenly(is_thorough):
    cases = list(range(10))
    assert spread(cases) == (cases if is_thorough else [0, 4, 8, 9])
    assert spread(cases[:1]) == [0]
    assert spread([]) == []


@given(st.integers())
def test_each_example_begins_with_the_same_random_numbers(number):
    assert torch.initial_seed() == 0
    torch.rand(3)
    torch.manual_seed(number % 2**32)
