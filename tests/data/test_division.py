# SPDX-License-Identifier: Apache-2.0
"""Map-style data that several processes divide: the samples of each update, once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ipufit import BatchPlan, DataError
from ipufit.data.calls import (
    InferenceBatches,
    TrainingBatches,
)
from ipufit.data.sources import as_source
from tests import reference
from tests.data._together import together
from tests.strategies import config_for, plans

COUNTS = st.integers(1, 4)


def options_for(plan):
    return config_for(plan).build_training_options(replace(plan, processes=1))


class Counted(torch.utils.data.Dataset):
    """Numbers, and which of them were read."""

    def __init__(self, count):
        self.count, self.read = count, set()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read.add(index)
        return torch.tensor(index), torch.tensor(-index)


def batches_of(kind, plan, data, processes, *, num_workers=0, **settings):
    data = data if isinstance(data, tuple) else (data,)
    source = as_source(*data, processes=processes, num_workers=num_workers)
    return kind(source, plan, options_for(plan), processes=processes, **settings)


def training(*given, shuffle=False, **settings):
    return batches_of(TrainingBatches, *given, shuffle=shuffle, **settings)


def inference(*given, **settings):
    return batches_of(InferenceBatches, *given, **settings)


def by_update(results, plan):
    """The real rows of each update: of every call and process, in their order."""
    updates = []
    for calls in zip(*results):
        for number in range(plan.device_iterations):
            at = number * plan.samples_per_update
            rows = slice(at, at + plan.samples_per_update)
            updates.append([c.batch[0][: c.num_real][rows].tolist() for c in calls])
    return updates


def joined(lists):
    return [number for numbers in lists for number in numbers]


@given(
    st.data(),
    COUNTS,
    plans(2),
    st.booleans(),
    st.booleans(),
    st.sampled_from([True, "pad"]),
)
def test_an_update_has_the_same_samples_in_any_number_of_processes(
    data, count, plan, shuffle, fast, drop_last
):
    per_call = plan.samples_per_call * count
    extra = data.draw(st.integers(0, per_call - 1))
    num_samples = data.draw(st.integers(1, 2)) * per_call + extra
    numbers = torch.arange(num_samples)
    given = (numbers,) if fast else reference.Recorded(numbers, -numbers)
    settings = {"shuffle": shuffle, "drop_last": drop_last, "seed": 5}

    def two_passes(processes, plan=plan):
        batches = training(plan, given, processes, **settings)
        calls = [list(batches) for _ in range(2)]
        figures = batches.num_calls, batches.num_dropped, batches.num_empty_updates
        return calls, figures, batches.position

    alone_plan = replace(plan, replicas=plan.replicas * count)
    [(whole, *figures)] = together(1, lambda one: two_passes(one, alone_plan))
    results = together(count, two_passes)
    for calls_of_each, alone in zip(zip(*[r[0] for r in results]), whole):
        updates = by_update(calls_of_each, plan)
        expected = by_update([alone], alone_plan)
        assert [joined(parts) for parts in updates] == [one for [one] in expected]
        for calls, one in zip(zip(*calls_of_each), alone):
            assert sum(call.num_real for call in calls) == one.num_real
            assert {call.num_real_of_all for call in calls} == {one.num_real}
            if drop_last == "pad" and extra:
                shape = plan.device_iterations, -1
                own = [call.batch[-1].reshape(shape) for call in calls]
                torch.testing.assert_close(
                    torch.cat(own, dim=1), one.batch[-1].reshape(shape)
                )
    assert [r[1:] for r in results] == [tuple(figures)] * count


@pytest.mark.parametrize("as_loader", [False, True])
def test_a_dataset_is_read_where_its_samples_are_used(as_loader):
    def use(processes):
        dataset = Counted(48)
        data = DataLoader(dataset, 24, shuffle=True) if as_loader else dataset
        given = {} if as_loader else {"shuffle": True, "seed": 1}
        batches = training(BatchPlan(6), data, processes, **given)
        dataset.read.clear()
        used = {number for call in batches for number in call.batch[0].tolist()}
        assert dataset.read == used
        return used

    used = together(4, use)
    assert all(len(some) == 12 for some in used)
    assert set().union(*used) == set(range(48))


def test_a_seed_that_is_not_given_is_drawn_by_process_0():
    plan = BatchPlan(4)

    def orders(processes):
        batches = training(plan, (torch.arange(16),), processes, shuffle=True)
        return batches.seed

    alone = together(1, orders)
    assert together(2, orders) == alone * 2


def test_too_few_samples_for_a_call_of_all_processes_are_refused():
    plan = BatchPlan(4, processes=2)
    with pytest.raises(DataError, match="in each of 2 processes"):
        together(2, lambda p: training(plan, (torch.arange(7),), p))


# Inference -------------------------------------------------------------------


@given(
    COUNTS,
    plans(2),
    st.integers(1, 60),
    st.booleans(),
    st.none() | st.integers(1, 60),
)
def test_every_sample_is_inferred_once_and_outputs_can_be_put_in_order(
    count, plan, num_samples, fast, most
):
    numbers = torch.arange(num_samples)
    data = numbers if fast else reference.Recorded(numbers, -numbers)
    plan = replace(plan, gradient_accumulation=1)

    def calls(processes):
        batches = inference(plan, data, processes, max_rows=most)
        calls = list(batches)
        assert len(calls) == batches.num_calls
        assert batches.num_samples == min(num_samples, most or num_samples)
        left_over = [batches.left_over(call.num_real_of_each) for call in calls]
        assert [n for one in left_over for n in one] == batches.left_over(
            batches.num_samples
        )
        return calls

    results = together(count, calls)
    for of_each in zip(*results):
        [num_real_of_each] = {call.num_real_of_each for call in of_each}
        assert [call.num_real for call in of_each] == list(num_real_of_each)
        assert {call.num_real_of_all for call in of_each} == {sum(num_real_of_each)}
    expected = list(range(min(num_samples, most or num_samples)))
    passes = by_update(results, plan)
    assert [n for of_pass in passes for of_one in of_pass for n in of_one] == expected


def test_steps_count_the_passes_of_all_processes():
    plan = BatchPlan(2, device_iterations=3)
    [batches, _] = together(2, lambda p: inference(plan, torch.arange(20), p))
    counts = 1, 4, 5, 8, 12, 13
    assert [batches.num_passes(n) for n in counts] == [1, 1, 2, 2, 3, 4]
