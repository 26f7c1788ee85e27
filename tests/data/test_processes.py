# SPDX-License-Identifier: Apache-2.0
"""Runs of several processes on each kind of data have the figures of one process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.data.runs import by_batches, fitted

KINDS = [
    "arrays",
    "weights",
    "mixed",
    "dataset",
    "cache",
    "loader",
    "stream",
    "own stream",
    "generator",
]


def require_like(run, expected):
    history, weights = run
    assert history.keys() == expected[0].keys()
    for name, figures in expected[0].items():
        np.testing.assert_allclose(history[name], figures, atol=1e-5, err_msg=name)
    for weight, other in zip(weights, expected[1]):
        np.testing.assert_allclose(weight, other, atol=1e-5)


EVERY = [(kind, drop_last) for kind in KINDS for drop_last in ("pad", True)]
REST = EVERY[1::4] + EVERY[2::4]  # each kind once, half of them with either end


@pytest.mark.parametrize(
    ("kind", "drop_last"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case in REST else [])
        for case in EVERY
    ],
)
def test_figures_are_those_of_one_process(pool, kind, drop_last):
    expected = fitted(kind, drop_last)
    runs = pool.run(fitted, kind, drop_last)
    assert runs[0] == runs[1]
    require_like(runs[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_figures_of_three_processes_are_those_of_one(pool, kind):
    runs = pool.run(fitted, kind, count=3)
    assert runs[0] == runs[1] == runs[2]
    require_like(runs[0], fitted(kind))


def test_single_batches_are_divided(pool):
    figures, weights = by_batches()
    for run in pool.run(by_batches):
        for own, one in zip(run[0], figures):
            assert own == pytest.approx(one, abs=1e-5)
        for weight, other in zip(run[1], weights):
            np.testing.assert_allclose(weight, other, atol=1e-5)
