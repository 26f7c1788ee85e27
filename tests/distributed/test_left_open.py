# SPDX-License-Identifier: Apache-2.0
"""The updates of a call, chosen by several processes: the same in all."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.runs import left_open


@pytest.mark.parametrize(
    ("form", "expected"), [("arrays", 6), ("loader", 5), ("heard by one", 1)]
)
def test_processes_choose_alike_and_change_no_bit(pool, form, expected):
    chosen = pool.run(left_open, None, form)
    told = pool.run(left_open, 1, form)
    assert [run["iterations"] for run in chosen] == [expected] * 2
    for one, other in zip(chosen, told):
        assert one["history"] == other["history"]
        for mine, theirs in zip(one["weights"], other["weights"]):
            assert np.array_equal(mine, theirs)
