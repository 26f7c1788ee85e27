# SPDX-License-Identifier: Apache-2.0
"""Streams that give each of several processes a part of its own."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, TensorDataset

from ipufit import BatchPlan, WholeStreamWarning, poptorch
from ipufit.data import InferenceBatches, as_source
from ipufit.distributed import configure, get_process_info
from tests.data._together import together
from tests.data.test_division import joined, options_for
from tests.data.test_shared_streams import Numbers, OwnNumbers, in_turn


class IterableNumbers(IterableDataset):
    """Samples one by one, from a list of numbers."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return (torch.tensor(number) for number in self.numbers)


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


# PopTorch's loader without parts -----------------------------------------------


def unpartitioned(processes, dataset, batch_size=4, **given):
    options = poptorch.Options()
    options.Distributed.configureProcessId(processes.index, processes.count)
    return poptorch.DataLoader(
        options, dataset, batch_size, auto_distributed_partitioning=False, **given
    )


def numbers_of(calls):
    return [n for call in calls for n in call.batch[0][: call.num_real].tolist()]


@pytest.mark.parametrize("dataset", [Numbers(32), TensorDataset(torch.arange(32))])
def test_a_loader_of_poptorch_without_parts_is_divided(dataset):
    def run(processes):
        loader = unpartitioned(processes, dataset)
        batches = inference(BatchPlan(4), loader, processes)
        assert not batches.source.is_own_part
        return numbers_of(batches)

    with pytest.warns(WholeStreamWarning, match="reads all of `x`"):
        seen = together(2, run)
    assert sorted(joined(seen)) == list(range(32))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_in_a_loader_of_poptorch_divides_itself(num_workers):
    def run(processes):
        # A thread can't be told its number in a process that loads.
        own = IterableNumbers(range(processes.index, 32, processes.count))
        own.is_divided = True
        dataset = own if num_workers else OwnNumbers(32)
        loader = unpartitioned(processes, dataset, num_workers=num_workers)
        batches = inference(BatchPlan(4), loader, processes)
        assert batches.source.is_own_part
        return numbers_of(batches)

    with warnings.catch_warnings():
        warnings.simplefilter("error", WholeStreamWarning)
        seen = together(2, in_turn(run))
    assert seen == [list(range(0, 32, 2)), list(range(1, 32, 2))]


def test_a_sampler_divides_what_a_loader_of_poptorch_does_not():
    def run(processes):
        dataset = TensorDataset(torch.arange(32))
        sampler = DistributedSampler(dataset, 2, processes.index, shuffle=False)
        loader = unpartitioned(processes, dataset, sampler=sampler)
        return numbers_of(inference(BatchPlan(4), loader, processes))

    assert together(2, run) == [list(range(0, 32, 2)), list(range(1, 32, 2))]


# Steps -------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 8, 15, 16, 30])
def test_steps_take_as_many_samples_of_each_part(most):
    def run(processes):
        own = OwnNumbers(64)
        batches = inference(
            BatchPlan(4, device_iterations=2), own, processes, max_rows=most
        )
        return numbers_of(batches)

    seen = together(2, in_turn(run))
    assert seen == [list(range(0, most, 2)), list(range(1, most, 2))]


class OwnOnce:
    """An iterator over batches of this process."""

    is_divided = True

    def __init__(self):
        info = get_process_info()
        batches = torch.arange(24).reshape(-1, info.count, 3)
        self.batches = iter(batches[:, info.index])

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.batches)


def test_an_iterator_gives_the_next_batches_of_each_part():
    def run(processes):
        batches = inference(BatchPlan(6), OwnOnce(), processes, max_rows=6)
        return [numbers_of(batches) for _ in range(4)]

    first, second = together(2, in_turn(run))
    assert first == [[0, 1, 2], [6, 7, 8], [12, 13, 14], [18, 19, 20]]
    assert second == [[3, 4, 5], [9, 10, 11], [15, 16, 17], [21, 22, 23]]
