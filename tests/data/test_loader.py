# SPDX-License-Identifier: Apache-2.0
"""The batches of calls: what is dropped, padded, shuffled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit import BatchPlan, DataError, IPUConfig
from ipufit.data import InferenceBatches, TrainingBatches, as_source
from ipufit.data.loader import collate
from tests import reference
from tests.strategies import plans, sample_counts


def options_for(plan):
    config = IPUConfig(
        micro_batch_size=plan.micro_batch_size,
        gradient_accumulation=plan.gradient_accumulation,
        replicas=plan.replicas,
        device_iterations=plan.device_iterations,
    )
    return config.build_training_options(plan)


def training(plan, count, *, fast=True, **settings):
    numbers = torch.arange(count)
    source = (
        as_source(numbers) if fast else as_source(reference.Recorded(numbers, -numbers))
    )
    settings = {"shuffle": False, **settings}
    return TrainingBatches(source, plan, options_for(plan), **settings)


def numbers_of(batches):
    return [batch[0].tolist() for batch in batches]


@given(st.data(), plans(), st.booleans(), st.booleans())
def test_calls_times_samples_and_the_dropped_are_all(data, plan, shuffle, fast):
    count = data.draw(sample_counts(plan, most_calls=3))
    batches = training(plan, count, fast=fast, shuffle=shuffle)
    calls = numbers_of(batches)
    assert len(calls) == len(batches) == count // plan.samples_per_call
    assert all(len(call) == plan.samples_per_call for call in calls)
    assert batches.num_dropped == count - len(calls) * plan.samples_per_call
    seen = [number for call in calls for number in call]
    assert len(set(seen)) == len(seen)
    if not shuffle:
        assert seen == list(range(len(seen)))


def test_a_seed_fixes_the_orders_and_they_differ():
    plan = BatchPlan(8)
    first, second = (
        training(plan, 64, shuffle=True, seed=1),
        training(plan, 64, shuffle=True, seed=1),
    )
    orders = [numbers_of(first), numbers_of(first)]
    assert orders == [numbers_of(second), numbers_of(second)]
    assert orders[0] != orders[1]
    assert numbers_of(training(plan, 64, shuffle=True, seed=2)) not in orders


def test_without_a_seed_torchs_generator_decides():
    plan = BatchPlan(8)
    orders = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        orders.append(numbers_of(training(plan, 64, shuffle=True)))
    assert orders[0] == orders[1] != orders[2]


def test_too_few_samples_for_a_call_show_every_factor():
    plan = BatchPlan(2, 3, replicas=4, device_iterations=5)
    with pytest.raises(DataError) as caught:
        training(plan, 119)
    for part in (
        "119",
        "120 =",
        "micro-batch 2",
        "accumulation 3",
        "replicas 4",
        "iterations 5",
    ):
        assert part in str(caught.value)


@given(plans(), st.integers(1, 60), st.booleans())
def test_inference_covers_every_sample_once_and_pads_the_last_call(plan, count, fast):
    plan = BatchPlan(plan.micro_batch_size, 1, plan.replicas, 1, plan.device_iterations)
    numbers = torch.arange(count)
    source = (
        as_source(numbers) if fast else as_source(reference.Recorded(numbers, numbers))
    )
    batches = InferenceBatches(source, plan, options_for(plan))
    seen = []
    for index, (batch, num_real) in enumerate(batches):
        assert len(batch[0]) == plan.samples_per_call
        assert num_real == plan.samples_per_call or index == len(batches) - 1
        seen += batch[0][:num_real].tolist()
    assert seen == list(range(count))


def test_samples_of_different_shapes_cannot_share_a_call():
    with pytest.raises(DataError, match=r"different shapes.*Pad or crop"):
        collate([(torch.zeros(2),), (torch.zeros(3),)])
