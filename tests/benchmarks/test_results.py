# SPDX-License-Identifier: Apache-2.0
"""Ratios, medians, and the check that nobody wins by doing less."""

from __future__ import annotations

import math

import pytest

from benchmarks.results import Measured, Spread, complaints
from benchmarks.worker import Job


def result(cpu, first=1.0, peak=100):
    times = {"cpu": cpu, "wall": 2 * cpu}
    one = {"first": {"cpu": first, "wall": first}, "measured": times}
    return {
        "operations": {"train": one},
        "figures": {},
        "peak_bytes": peak,
        "set_up": {"cpu": 0.25, "wall": 0.5},
    }


def measured(**results):
    found = Measured()
    for contestant, each in results.items():
        for one in each:
            found.add(Job("W2", contestant, ("train",)), one)
    return found


def test_a_repeat_is_compared_with_the_plain_loop_of_the_same_repeat():
    plain = [result(1.0), result(2.0), result(4.0)]
    mine = [result(0.5), result(0.5, first=0.75, peak=150), result(4.0)]
    rows = measured(plain=plain, ipufit=mine).rows()
    assert [row.contestant for row in rows] == ["plain", "ipufit"]
    assert rows[1].speed == Spread(2.0, 1.0, 4.0)
    assert rows[1].wall_speed == Spread(2.0, 1.0, 4.0)
    assert rows[1].memory == Spread(1.0, 1.0, 1.5)
    assert rows[1].first_seconds == 0.25


PLAIN = {
    "train": [[1.0, 0.5], [0.5, 0.75]],
    "evaluate": [0.4, 0.8],
    "predict": [16, [0.0, 1.0]],
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train": [[1.0, 0.5]]}, "1 epochs instead of 2"),
        ({"train": [[1.0, 0.5], [1.0, 0.75]]}, "the loss went from 1 to 1"),
        ({"train": [[1.0, 0.5], [0.53, 0.75]]}, "loss differs by 0.06"),
        ({"train": [[1.01, 0.5], [0.5, 0.75]]}, "first loss differs by 0.01"),
        ({"train": [[1.0, 0.5], [0.5, 0.7]]}, "accuracy differs by 0.05"),
        ({"train": [[1.0, 0.5], [math.nan, 0.75]]}, "loss differs by inf"),
        ({"evaluate": [0.5, 0.8]}, "loss differs by 0.25"),
        ({"predict": [15, [0.0, 1.0]]}, "15 rows instead of 16"),
    ],
)
def test_less_work_or_other_work_is_noticed(change, said):
    assert said in complaints({**PLAIN, **change}, PLAIN, 2, 1000)
