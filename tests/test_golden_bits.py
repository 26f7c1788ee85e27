# SPDX-License-Identifier: Apache-2.0
"""Runs give the numbers that are recorded in `tests/golden/bits`, bit by bit.

Where torch's release or the processor isn't that of the recording they are nearly the
same, and runs that draw random numbers are left out. CONTRIBUTING.md says how to
record a run anew.
"""

from __future__ import annotations

import pytest
import torch

from tests.emulator._datasets import preload_fork_server
from tests.golden import bits
from tests.golden.runs import DRAWING, RUNS

preload_fork_server()

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


BEFORE = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1, 2])}


@pytest.mark.parametrize(
    ("now", "tolerance", "expected"),
    [
        ({}, None, []),
        ({}, 1e-5, []),
        ({"a": torch.tensor([1.0, 2.0000002])}, None, ["a differs by 1.2e-07"]),
        ({"a": torch.tensor([1.0, 2.0000002])}, 1e-5, []),
        ({"a": torch.tensor([1.0, 2.001])}, 1e-5, ["a differs by 0.0005"]),
        ({"a": torch.tensor([1.0, 2.001])}, 1e-3, []),
        ({"a": torch.tensor([1.0])}, 1.0, ["a: torch.float32 [1] and not"]),
        ({"b": torch.tensor([1, 3])}, 1.0, ["b differs by 0.5"]),
        ({"c": torch.tensor(1)}, 1.0, ["c is new"]),
        ({"a": torch.tensor([1.0, float("nan")])}, 1.0, ["a differs by nan"]),
    ],
)
def test_differences_are_said(now, tolerance, expected):
    found = bits.differences({**BEFORE, **now}, BEFORE, tolerance)
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected))


def test_a_number_that_is_not_one_stays_none():
    nan = {"a": torch.tensor([float("nan"), float("inf"), 1.0])}
    assert bits.differences(nan, nan) == []
    assert bits.differences(nan, nan, 1e-5) == []


def test_a_number_that_is_gone_is_said():
    assert bits.differences({}, BEFORE) == ["a is gone", "b is gone"]


def test_all_numbers_that_nest_are_found():
    outcome = {"history": {"loss": [0.5, 0.25]}, "outputs": ({"x": torch.ones(2)}, 3)}
    found = dict(bits.flat(outcome))
    assert list(found) == ["history/loss", "outputs/0/x", "outputs/1"]
    assert found["history/loss"].tolist() == [0.5, 0.25]


def test_large_tensors_of_integers_are_kept_as_digests():
    [(name, digest)] = bits.flat({"state": torch.arange(1000)})
    [(_, other)] = bits.flat({"state": torch.arange(1, 1001)})
    assert name == "sha256 of state"
    assert len(digest) == 32
    assert not torch.equal(digest, other)
