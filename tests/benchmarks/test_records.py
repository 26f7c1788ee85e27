# SPDX-License-Identifier: Apache-2.0
"""What was measured before stays beside what is measured now."""

from __future__ import annotations

from benchmarks import records
from benchmarks.results import Row, Spread

ONE = Spread(1.0, 1.0, 1.0)


def row(contestant, speed, workload="W2", operation="train"):
    return Row(workload, operation, contestant, speed, ONE, ONE, 0.5, 1.0, None, ONE)


def test_newer_rows_stand_for_older_ones_in_the_usual_order():
    older = [
        row(name, ONE, work) for work in ("W2", "W1") for name in ("plain", "bare")
    ]
    slower = Spread(0.5, 0.5, 0.5)
    newer = [row("bare", slower, "W1"), row("ipufit-default", slower, "W1")]
    found = records.merged(older, newer)
    assert [(one.workload, one.contestant, one.speed.median) for one in found] == [
        ("W2", "plain", 1.0),
        ("W2", "bare", 1.0),
        ("W1", "plain", 1.0),
        ("W1", "ipufit-default", 0.5),
        ("W1", "bare", 0.5),
    ]
