# SPDX-License-Identifier: Apache-2.0
"""What a state looks like, and which first fault of it is named."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ipufit._kinds import (
    anything,
    array,
    count,
    dict_of,
    each_of,
    fields,
    flag,
    like,
    list_of,
    number,
    optional,
    text,
    whole,
)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (count, [0, 2**63 - 1], [-1, 2**63, True, 1.0, "1", None, []]),
        (whole, [-(2**63), 2**64 - 1], [2**64, True, 1.0, None]),
        (number, [0, -1.5, math.nan, math.inf], [True, "1", None, 2**2000, [1]]),
        (text, ["", "x"], [None, 1, ["x"]]),
        (flag, [True], [1, None, "x"]),
        (array, [torch.zeros(1), np.zeros(1)], [1.0, [1.0]]),
        (optional(count), [None, 1], ["x", 1.5]),
        (list_of(count), [[], [1], (1, 2)], [None, [1, "x"], {"a": 1}, "11"]),
        (list_of(count, 2), [[1, 2]], [[], [1], [1, 2, 3]]),
        (dict_of(count), [{}, {"a": 1}], [[], {"a": "x"}, {1: 1}]),
        (fields({"a": count}), [{"a": 1}, {"a": 1, "b": "x"}], [{}, {"a": "x"}, [1]]),
        (fields({}, is_closed=True), [{}], [{"a": 1}]),
        (each_of([count, text]), [[1, "x"]], [[1], ["x", 1], 5]),
        (like({"a": [1.0, None], "b": ()}), [{"a": [2, 3], "b": [7]}], [{"a": [1]}]),
        (like(True), [False], [1, None]),
        (like("x"), [""], [1]),
        (like(0.5), [1], [None, True, "x"]),
        (anything, [None, [[]]], []),
    ],
)
def test_which_values_are_of_a_kind(kind, right, wrong):
    assert [value for value in right if kind(value, "it") is not None] == []
    assert [value for value in wrong if kind(value, "it") is None] == []


def test_the_place_and_the_value_are_named():
    kind = fields({"rates": list_of(fields({"lr": number}))})
    assert kind({"rates": [{"lr": 1.0}, {"lr": "x"}]}, "state") == (
        "state.rates[1].lr is 'x', where a number belongs"
    )
    assert kind({"rates": [{}]}, "state") == "state.rates[0] lacks lr"
