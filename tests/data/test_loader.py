# SPDX-License-Identifier: Apache-2.0
"""The batches of calls: what is dropped, padded, shuffled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit import BatchPlan, DataError
from ipufit.data.calls import InferenceBatches, TrainingBatches, rebatched
from ipufit.data.sources import StreamSource, as_source
from tests import reference
from tests.data.test_division import options_for
from tests.strategies import plans


def training(plan, count, *, fast=True, **settings):
    numbers = torch.arange(count)
    source = (
        as_source(numbers) if fast else as_source(reference.Recorded(numbers, -numbers))
    )
    settings = {"shuffle": False, **settings}
    return TrainingBatches(source, plan, options_for(plan), **settings)


def numbers_of(batches):
    return [call.batch[0].tolist() for call in batches]


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


# Streams --------------------------------------------------------------------------


def stream_of(sizes):
    """A stream of counted numbers, in blocks of these sizes."""
    numbers = torch.arange(sum(sizes)).split(list(sizes))
    return StreamSource(list(numbers), lambda batch: (batch,), name="x")


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=8)


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


@pytest.mark.parametrize("most", [1, 4, 5, 12])
def test_only_the_first_rows_are_looked_at(most):
    plan = BatchPlan(2, device_iterations=2)
    for source in (as_source(torch.arange(9)), stream_of([4, 5])):
        batches = InferenceBatches(source, plan, options_for(plan), max_rows=most)
        seen = [n for call in batches for n in call.batch[0][: call.num_real].tolist()]
        assert seen == list(range(min(most, 9)))
