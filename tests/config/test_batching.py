# SPDX-License-Identifier: Apache-2.0
"""`batch_size` and its factors."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipufit import BatchPlan, ConfigError, IPUConfig
from tests.strategies import plans


def derive(batch_size=None, processes=1, stages=1, **factors):
    names = [f"stage {index}" for index in range(stages)]
    config = IPUConfig(
        pipeline=names if stages > 1 else None,
        process_id=0,
        num_processes=processes,
        **factors,
    )
    return config.training_plan(batch_size)


@given(plans(most=50))
def test_a_call_is_made_of_its_factors(plan):
    assert plan.batch_size == (
        plan.micro_batch_size * plan.gradient_accumulation * plan.replicas
    )
    assert plan.samples_per_call == plan.batch_size * plan.device_iterations
    assert plan.micro_batches_per_call * plan.micro_batch_size == plan.samples_per_call


def test_processes_count_for_the_batch_but_not_for_a_call_of_one_process():
    plan = BatchPlan(3, gradient_accumulation=2, replicas=4, processes=5)
    assert plan.batch_size == 120
    assert plan.samples_per_update == plan.samples_per_call == 24


@given(plans(most=12), st.sampled_from(["micro", "accumulation", "both", "neither"]))
def test_what_is_left_open_is_derived(plan, given):
    factors = {"replicas": plan.replicas}
    if given in ("micro", "both"):
        factors["micro_batch_size"] = plan.micro_batch_size
    if given in ("accumulation", "both"):
        factors["gradient_accumulation"] = plan.gradient_accumulation
    derived = derive(plan.batch_size, **factors)
    assert derived.batch_size == plan.batch_size
    for name, value in factors.items():
        assert getattr(derived, name) == value


@given(
    st.integers(1, 500),
    st.none() | st.integers(1, 40),
    st.none() | st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_a_plan_keeps_every_promise_or_is_refused(
    batch_size, micro, accumulation, replicas, processes, stages
):
    try:
        plan = derive(
            batch_size,
            micro_batch_size=micro,
            gradient_accumulation=accumulation,
            replicas=replicas,
            processes=processes,
            stages=stages,
        )
    except ConfigError:
        copies, least = replicas * processes, 2 * stages - 1
        assert not any(
            size * steps * copies == batch_size
            for size in ([micro] if micro else range(1, batch_size + 1))
            for steps in ([accumulation] if accumulation else range(1, batch_size + 1))
            if steps >= least
        )
        return
    assert plan.batch_size == batch_size
    assert plan.micro_batch_size == (micro or plan.micro_batch_size)
    assert plan.gradient_accumulation == (accumulation or plan.gradient_accumulation)
    assert (plan.replicas, plan.processes) == (replicas, processes)
    assert plan.gradient_accumulation >= 2 * stages - 1


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 6))
def test_the_nearest_legal_values_are_legal_and_nearest(batch_size, micro, replicas):
    factors = {"micro_batch_size": micro, "replicas": replicas}
    if batch_size % (micro * replicas) == 0:
        assert derive(batch_size, **factors).batch_size == batch_size
        return
    with pytest.raises(ConfigError) as caught:
        derive(batch_size, **factors)
    sentence = str(caught.value).split("legal value")[1]
    nearest = [int(number) for number in re.findall(r"\d+", sentence)]
    assert nearest
    for value in nearest:
        assert derive(value, **factors).batch_size == value
        assert abs(value - batch_size) < micro * replicas


def test_a_batch_that_contradicts_given_factors_names_the_product():
    with pytest.raises(ConfigError, match="batch_size=24"):
        derive(100, micro_batch_size=4, gradient_accumulation=3, replicas=2)


@pytest.mark.parametrize(("batch_size", "expected"), [(7, (14, 1)), (100, (98, 112))])
def test_the_legal_values_below_the_smallest_are_not_offered(batch_size, expected):
    with pytest.raises(ConfigError) as caught:
        derive(batch_size, gradient_accumulation=7, replicas=2)
    numbers = re.findall(r"\d+", str(caught.value).split("legal value")[1])
    assert "0" not in numbers
    assert str(expected[0]) in numbers


def test_nothing_at_all_is_kerass_32_and_factors_alone_give_the_batch():
    assert derive().batch_size == 32
    plan = derive(micro_batch_size=5, gradient_accumulation=3, replicas=2)
    assert plan.batch_size == 30


def test_accumulation_that_cannot_fill_the_pipeline_is_refused():
    with pytest.raises(ConfigError, match=r"gradient_accumulation=4 .* 3 stages.*= 5"):
        derive(gradient_accumulation=4, stages=3)


def test_a_batch_too_small_for_the_pipeline_is_refused_with_the_least():
    with pytest.raises(ConfigError, match="batch_size=24 or more"):
        derive(16, micro_batch_size=4, replicas=2, stages=2)
