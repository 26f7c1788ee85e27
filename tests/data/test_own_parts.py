# SPDX-License-Identifier: Apache-2.0
"""Streams that give each of several processes a part of its own."""

from __future__ import annotations

import pytest

from ipufit import BatchPlan
from ipufit.data import InferenceBatches, as_source
from ipufit.distributed import configure
from tests.data._together import together
from tests.data.test_division import options_for
from tests.data.test_shared_streams import OwnNumbers, in_turn


@pytest.fixture(autouse=True)
def _by_the_launcher_again():
    yield
    configure(None)


def inference(plan, data, processes, **given):
    return InferenceBatches(
        as_source(data, processes=processes),
        plan,
        options_for(plan),
        processes=processes,
        **given,
    )


@pytest.mark.parametrize("extra", range(12))
def test_a_part_that_ends_earlier_keeps_its_single_rows(extra):
    plan = BatchPlan(2, device_iterations=2)

    def run(processes):
        batches = inference(plan, OwnNumbers(6, extra), processes)
        batches.has_singles = True
        calls = list(batches)
        rows = [
            n
            for call in calls
            for n in call.batch[0][: 2 * call.num_singles : 2].tolist()
        ]
        return [call.num_singles for call in calls], rows

    (of_first, rows_of_first), (of_other, rows_of_other) = together(2, in_turn(run))
    assert rows_of_other == [5]
    assert len(rows_of_first) == (3 + extra) % 2
    assert len(of_first) == len(of_other)
