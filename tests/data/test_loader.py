# SPDX-License-Identifier: Apache-2.0
"""The batches of calls: what is dropped, padded, shuffled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit import BatchPlan, DataError, IPUConfig
from ipufit.data import (
    InferenceBatches,
    StreamSource,
    TrainingBatches,
    as_source,
)
from ipufit.data.calls import rebatched, shares
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
    return [call.batch[0].tolist() for call in batches]


@given(st.data(), plans(), st.booleans(), st.booleans())
def test_calls_times_samples_and_the_dropped_are_all(data, plan, shuffle, fast):
    count = data.draw(sample_counts(plan, most_calls=3))
    batches = training(plan, count, fast=fast, shuffle=shuffle)
    calls = numbers_of(batches)
    assert len(calls) == batches.num_calls == count // plan.samples_per_call
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
    for index, (batch, num_real, *_) in enumerate(batches):
        assert len(batch[0]) == plan.samples_per_call
        assert num_real == plan.samples_per_call or index == batches.num_calls - 1
        seen += batch[0][:num_real].tolist()
    assert seen == list(range(count))


# Streams --------------------------------------------------------------------------


def stream_of(sizes):
    """A stream of counted numbers, in blocks of these sizes."""
    numbers = torch.arange(sum(sizes)).split(list(sizes))
    return StreamSource(list(numbers), lambda batch: (batch,), name="x")


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(sizes, st.integers(1, 12))
def test_blocks_of_any_sizes_become_batches_of_one(sizes, rows):
    blocks = [[part] for part in torch.arange(sum(sizes)).split(sizes)]
    batches = list(rebatched(blocks, rows))
    assert [number for (batch,), _ in batches for number in batch.tolist()] == list(
        range(sum(sizes))
    )
    assert all(count == len(batch[0]) for batch, count in batches)
    assert all(count == rows for _, count in batches[:-1])
    assert 0 < batches[-1][1] <= rows


@given(sizes, st.integers(1, 12))
def test_memory_that_is_used_again_is_not_kept(sizes, rows):
    def reused():
        at = 0
        memory = torch.empty(9, dtype=torch.int64)
        for size in sizes:
            memory[:] = -1
            memory[:size] = torch.arange(at, at + size)
            at += size
            yield [memory[:size]]

    seen = [n for (batch,), _ in rebatched(reused(), rows) for n in batch.tolist()]
    assert seen == list(range(sum(sizes)))


@given(sizes, plans(most=2))
def test_streams_are_padded_dropped_and_covered_as_indexed_samples_are(sizes, plan):
    count = sum(sizes)
    options = options_for(plan)

    def of(kind, source, **settings):
        if kind is TrainingBatches:
            settings["shuffle"] = False
        batches = kind(source, plan, options, **settings)
        calls = [([t.tolist() for t in call.batch], call.num_real) for call in batches]
        return calls, batches

    numbers = torch.arange(count)
    calls, one = of(TrainingBatches, stream_of(sizes), drop_last="pad")
    expected, other = of(TrainingBatches, as_source(numbers), drop_last="pad")
    rows = plan.samples_per_call
    if count % rows:
        assert calls == expected
        assert one.num_empty_updates == other.num_empty_updates
    else:  # nobody knew beforehand
        assert [batch[0] for batch, _ in calls] == [batch[0] for batch, _ in expected]
        assert {share for batch, _ in calls for share in batch[1]} == {1.0}
    calls, _ = of(InferenceBatches, stream_of(sizes))
    expected, _ = of(InferenceBatches, as_source(numbers))
    assert calls == expected
    if count >= rows:
        calls, one = of(TrainingBatches, stream_of(sizes))
        expected, other = of(TrainingBatches, as_source(numbers))
        assert calls == expected
        assert one.num_dropped == other.num_dropped
        assert one.num_calls == other.num_calls


@given(st.integers(1, 40), plans(most=3))
def test_shares_of_an_update_add_up_to_its_rows(num_real, plan):
    rows, size = plan.samples_per_call, plan.samples_per_update
    num_real = min(num_real, rows)
    in_updates = torch.arange(rows).lt(num_real).reshape(-1, size).sum(dim=1)
    per_update = shares(num_real, rows, size, in_updates).reshape(-1, size)
    assert int(per_update.gt(0).sum()) == num_real
    for update in per_update:
        assert float(update.sum()) in (0.0, pytest.approx(size))
        assert len(set(update[update > 0].tolist())) <= 1


@pytest.mark.parametrize("most", [1, 4, 5, 12])
def test_only_the_first_rows_are_looked_at(most):
    plan = BatchPlan(2, device_iterations=2)
    for source in (as_source(torch.arange(9)), stream_of([4, 5])):
        batches = InferenceBatches(source, plan, options_for(plan), max_rows=most)
        seen = [n for call in batches for n in call.batch[0][: call.num_real].tolist()]
        assert seen == list(range(min(most, 9)))


@given(st.integers(1, 12), plans(most=2))
def test_rows_of_a_micro_batch_filled_in_part_follow_one_by_one(count, plan):
    plan = BatchPlan(plan.micro_batch_size, 1, plan.replicas, 1, plan.device_iterations)
    size = plan.micro_batch_size
    for source in (as_source(torch.arange(count)), stream_of([count])):
        batches = InferenceBatches(source, plan, options_for(plan))
        batches.has_singles = True
        num_calls, calls = batches.num_calls, list(batches)
        assert num_calls in (None, len(calls))
        rows = torch.cat([call.batch[0] for call in calls]).tolist()
        main = -(-count // plan.samples_per_call) * plan.samples_per_call
        assert rows[:main] == [*range(count), *[count - 1] * (main - count)]
        tail = range(count - count % size, count)
        singles = [row for row in tail for _ in range(size)]
        assert rows[main:][: len(singles)] == singles
        assert set(rows[main:][len(singles) :]) <= {count - 1}
        assert [call.num_real for call in calls if not call.num_real] == [0] * (
            len(calls) - main // plan.samples_per_call
        )
        assert sum(call.num_real for call in calls) == count
