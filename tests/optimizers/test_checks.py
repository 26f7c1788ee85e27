# SPDX-License-Identifier: Apache-2.0
"""Numbers out of range are refused with the range."""

from __future__ import annotations

import math

import pytest

from ipufit import ConfigError
from ipufit.optimizers.checks import check_number, check_whole


@pytest.mark.parametrize(
    ("value", "bounds"),
    [
        (0, {"least": 0}),
        (1.0, {"most": 1}),
        (0.5, {"above": 0, "below": 1}),
        (-3, {}),
    ],
)
def test_a_number_in_the_range_passes(value, bounds):
    check_number("Here", "x", value, **bounds)


@pytest.mark.parametrize(
    ("value", "bounds", "text"),
    [
        (-1, {"least": 0}, "at least 0"),
        (0, {"above": 0}, "above 0"),
        (1, {"least": 0, "below": 1}, "at least 0 and below 1"),
        (1.5, {"most": 1}, "at most 1"),
        (math.nan, {"least": 0}, "at least 0"),
        (math.inf, {"least": 0}, "at least 0"),
        (True, {"least": 0}, "at least 0"),
        ("1", {"least": 0}, "at least 0"),
    ],
)
def test_another_value_is_refused_with_the_range(value, bounds, text):
    with pytest.raises(ConfigError, match=rf"^Here has x={value!r}: .* {text}\.$"):
        check_number("Here", "x", value, **bounds)


@pytest.mark.parametrize("value", [0, 1.0, True, None, "2"])
def test_a_count_is_a_whole_number(value):
    check_whole("Here", "n", 1, least=1)
    with pytest.raises(ConfigError, match=r"Here has n=.*whole number of at least 1"):
        check_whole("Here", "n", value, least=1)
