# SPDX-License-Identifier: Apache-2.0
"""Runs give the numbers that are recorded in `tests/golden/bits`, bit for bit.

Where torch's release or the processor isn't that of the recording they are nearly the
same, and runs that draw random numbers are left out. CONTRIBUTING.md says how to
record a run anew.
"""

import pytest
import torch

from tests.golden import bits
from tests.golden.runs import DRAWING, RUNS

pytestmark = pytest.mark.not_in_mode(reason="sums have another order")


def test_every_run_is_recorded_and_no_other():
    assert {path.stem for path in bits.FOLDER.iterdir()} == set(RUNS)
    assert len(RUNS) >= 40


@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_the_numbers_that_are_recorded(name, request):
    before, made_by = bits.recorded(name)
    tolerance = bits.tolerance_of(name, made_by)
    if name in DRAWING and tolerance is not None:
        pytest.skip(f"random numbers may differ from those of {made_by}")
    pool = request.getfixturevalue("pool") if name in bits.IN_PROCESSES else None
    lines = bits.differences(bits.numbers_of(name, pool), before, tolerance)
    again = f"\nIf that is on purpose: python -m tests.golden.bits --write {name}"
    assert lines == [], "\n".join(lines) + again


def test_a_difference_is_said():
    before = {"a": torch.tensor([1.0, 2.0])}
    assert bits.differences(before, before) == []
    for now, tolerance, said in (
        ({"a": torch.tensor([1.0, 2.0000002])}, None, "a differs by 1.2e-07"),
        ({"a": torch.tensor([1.0, 2.001])}, 1e-5, "a differs by 0.0005"),
        ({"a": torch.tensor([1.0, float("nan")])}, 1.0, "a differs by nan"),
        ({}, 1.0, "a is gone"),
    ):
        assert bits.differences(now, before, tolerance) == [said]
