# SPDX-License-Identifier: Apache-2.0
"""One batch size on any number of processes and replicas: the same figures."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.processes.runs import fitted, left_open
from tests.strategies import examples, is_long

# Processes and replicas.
LAYOUTS = [(1, 4), (2, 1), (2, 4)]
MANY = [(4, 1), (4, 2)]  # whose start takes longest


@functools.lru_cache(maxsize=None)
def in_one_process(**arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fitted(**arguments)


def require_same(run, expected):
    """Histories, weights and outputs agree to float32's rounding over all updates."""
    assert run["history"].keys() == expected["history"].keys()
    for name, figures in expected["history"].items():
        np.testing.assert_allclose(run["history"][name], figures, atol=1e-4, rtol=1e-4)
    for name, figure in expected["evaluated"].items():
        np.testing.assert_allclose(run["evaluated"][name], figure, atol=1e-4, rtol=1e-4)
    for weight, other in zip(run["weights"], expected["weights"]):
        np.testing.assert_allclose(weight, other, atol=1e-4)
    np.testing.assert_allclose(run["predicted"], expected["predicted"], atol=1e-3)
    assert run["updates"] == expected["updates"]


def require_equal_everywhere(runs):
    """Every process has the same history, weights and outputs, bit for bit."""
    first, *others = runs
    for run in others:
        assert run["history"] == first["history"]
        assert run["evaluated"] == first["evaluated"]
        for weight, other in zip(run["weights"], first["weights"]):
            np.testing.assert_array_equal(weight, other)
        np.testing.assert_array_equal(run["predicted"], first["predicted"])


@pytest.mark.parametrize(
    ("form", "expected"), [("arrays", 6), ("loader", 5), ("heard by one", 1)]
)
def test_processes_choose_the_same_updates_of_a_call(pool, form, expected):
    chosen = pool.run(left_open, None, form)
    told = pool.run(left_open, 1, form)
    assert [run["iterations"] for run in chosen] == [expected] * 2
    for one, other in zip(chosen, told):
        assert one["history"] == other["history"]
        for mine, theirs in zip(one["weights"], other["weights"]):
            assert np.array_equal(mine, theirs)


@given(
    layout=st.sampled_from(LAYOUTS + MANY if is_long() else LAYOUTS),
    loss=st.sampled_from(["cross_entropy", "sum"]),
    arguments=st.fixed_dictionaries(
        {
            "is_frozen": st.booleans(),
            "is_weighted": st.booleans(),
            "drop_last": st.sampled_from([True, "pad"]),
            "device_iterations": st.sampled_from([1, 2]),
            "gradient_accumulation": st.sampled_from([None, 2]),
        }
    ),
)
@settings(max_examples=examples(20))
def test_updates_are_those_of_one_process(pool, layout, loss, arguments):
    processes, replicas = layout
    runs = pool.run(fitted, count=processes, replicas=replicas, loss=loss, **arguments)
    require_equal_everywhere(runs)
    require_same(runs[0], in_one_process(loss=loss, **arguments))
