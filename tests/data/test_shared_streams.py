# SPDX-License-Identifier: Apache-2.0
"""Streams in several processes: each sample once, ends that agree, one order."""

from __future__ import annotations

import itertools
import random
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

from ipufit import BatchPlan, DataError, poptorch
from ipufit.data.sources import as_source
from ipufit.distributed import configure, get_process_info
from ipufit.errors import WholeStreamWarning
from tests.data._together import together
from tests.data.test_division import (
    by_update,
    inference,
    joined,
    training,
)
from tests.strategies import examples, plans

pytestmark = pytest.mark.filterwarnings("ignore::ipufit.errors.WholeStreamWarning")


class Batches:
    """Can be begun anew; batches of unequal sizes."""

    def __init__(self, count, is_shuffled=False):
        self.count, self.is_shuffled = count, is_shuffled

    def __iter__(self):
        numbers = torch.arange(self.count)
        if self.is_shuffled:
            numbers = numbers[torch.randperm(self.count)]
        for part in numbers.split(5):
            random.random()
            yield part, -part


class Numbers(IterableDataset):
    """Samples one by one; all of them in each process."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for number in range(self.count):
            yield torch.tensor(number), torch.tensor(-number)


class OwnNumbers(Numbers):
    """Each process has those of its own; more in the first by `extra`."""

    is_divided = True

    def __init__(self, count, extra=0):
        super().__init__(count)
        self.extra = extra

    def __iter__(self):
        info = get_process_info()
        for number in range(info.index, self.count, info.count):
            yield torch.tensor(number), torch.tensor(-number)
        if not info.index:
            for number in range(self.extra):
                yield torch.tensor(1000 + number), torch.tensor(0)


def in_turn(function):
    """Have `get_process_info` tell each thread which process it is."""

    def run(processes):
        class Telling(type(processes)):
            def gathered(self, value):
                values = super().gathered(value)
                configure(self.info)
                return values

        processes.__class__ = Telling
        configure(processes.info)
        return function(processes)

    return run


@pytest.fixture(autouse=True)
def _by_the_launcher_again():
    yield
    configure(None)


def passes(count, plan, make, number=1, **given):
    """For each pass: the calls of each process; and the batches of each process."""

    def run(processes):
        batches = training(plan, make(), processes, **given)
        return [list(batches) for _ in range(number)], batches

    results = together(count, in_turn(run))
    return list(zip(*[calls for calls, _ in results])), [b for _, b in results]


def shuffled_loader(count=50, **given):
    numbers = torch.arange(count)
    return DataLoader(
        TensorDataset(numbers, -numbers), batch_size=6, shuffle=True, **given
    )


WHOLE = {
    "generator": lambda: ((part, -part) for part in torch.arange(50).split(7)),
    "iterable": lambda: Batches(50),
    "shuffled iterable": lambda: Batches(50, is_shuffled=True),
    "loader": shuffled_loader,
    "loader with workers": lambda: shuffled_loader(num_workers=2),
    "loader with persistent workers": lambda: shuffled_loader(
        num_workers=1, persistent_workers=True
    ),
    "loader with a generator": lambda: shuffled_loader(
        generator=torch.Generator().manual_seed(8)
    ),
    "samples": lambda: Numbers(50),
    "loader of samples": lambda: DataLoader(Numbers(50), batch_size=6),
}


@pytest.mark.parametrize(
    ("kind", "drop_last"), list(zip(WHOLE, itertools.cycle(["pad", True])))
)
def test_updates_have_the_samples_of_one_process(kind, drop_last):
    number = 1 if kind == "generator" else 2  # passes
    whole = BatchPlan(12, device_iterations=2)
    alone, [one] = passes(1, whole, WHOLE[kind], number, drop_last=drop_last)
    for count in (2,) if "workers" in kind else (3,):
        plan = BatchPlan(12 // count, device_iterations=2)
        several, batches = passes(count, plan, WHOLE[kind], number, drop_last=drop_last)
        orders = []
        for calls, calls_alone in zip(several, alone):
            orders.append([joined(p) for p in by_update(calls_alone, whole)])
            assert [joined(parts) for parts in by_update(calls, plan)] == orders[-1]
        in_order = ("generator", "iterable", "samples", "loader of samples")
        assert (len({*map(str, orders)}) == number) == (
            kind not in in_order or number == 1
        )
        for each in batches:
            assert each.num_calls == one.num_calls
            assert each.num_dropped == one.num_dropped
            assert each.num_empty_updates == one.num_empty_updates
        if drop_last == "pad":
            for of_each, [call_of_one] in zip(zip(*several[0]), zip(*alone[0])):
                shares = [call.batch[-1].reshape(2, -1) for call in of_each]
                torch.testing.assert_close(
                    torch.cat(shares, dim=1), call_of_one.batch[-1].reshape(2, -1)
                )


def test_a_stream_that_all_read_is_warned_of_once():
    with pytest.warns(WholeStreamWarning, match="Each of the 3 processes") as seen:
        passes(3, BatchPlan(4), WHOLE["samples"])
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("num_workers", "is_loader"), [(0, False), (2, False), (1, True)]
)
def test_a_dataset_that_asks_divides_itself(num_workers, is_loader):
    def make():
        if is_loader:
            return DataLoader(OwnNumbers(48), batch_size=5, num_workers=num_workers)
        return OwnNumbers(48)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = {} if is_loader else {"num_workers": num_workers}
        [calls], batches = passes(2, BatchPlan(4), make, **given)
    assert all(one.source.is_part for one in batches)
    numbers = [[n for call in own for n in call.batch[0].tolist()] for own in calls]
    assert [{n % 2 for n in own} for own in numbers] == [{0}, {1}]
    assert sorted(joined(numbers)) == list(range(48))


@settings(max_examples=examples(60))
@given(
    st.integers(1, 3),
    plans(2),
    st.integers(0, 30),
    st.integers(0, 30),
    st.sampled_from([True, "pad"]),
)
def test_uneven_ends_agree(count, plan, num_samples, extra, drop_last):
    if not num_samples + extra:
        return
    [calls], batches = passes(
        count, plan, lambda: OwnNumbers(num_samples, extra), drop_last=drop_last
    )
    seen = [n for own in calls for c in own for n in c.batch[0][: c.num_real].tolist()]
    assert len(set(seen)) == len(seen)
    assert len({len(own) for own in calls}) == 1
    assert {one.num_calls for one in batches} == {len(calls[0])}
    if drop_last == "pad":
        assert len(seen) == num_samples + extra
        updates = plan.device_iterations
        for of_each in zip(*calls):
            shares = [call.batch[-1].reshape(updates, -1) for call in of_each]
            sums = torch.cat(shares, dim=1).sum(dim=1)
            expected = torch.tensor(float(plan.samples_per_update * count))
            assert all(s == 0 or torch.isclose(s, expected) for s in sums)
    else:
        assert all(c.num_real == plan.samples_per_call for own in calls for c in own)


PARTS = {**WHOLE, "own": lambda: OwnNumbers(50)}
del PARTS["loader with persistent workers"]  # which wait, and are tried in training


@pytest.mark.parametrize(
    ("kind", "count", "most"),
    [
        *((kind, 2 + place % 2, None) for place, kind in enumerate(PARTS)),
        *(("generator", 2, most) for most in (3, 20)),
        ("loader", 2, 29),
        *(("own", 2, most) for most in (3, 29)),
    ],
)
def test_every_sample_is_inferred_once(kind, count, most):
    plan = BatchPlan(4, device_iterations=2)

    def run(processes):
        batches = inference(plan, PARTS[kind](), processes, max_rows=most)
        return list(batches)

    results = together(count, in_turn(run))
    seen = []
    for of_each in zip(*results):
        assert len({call.num_real_of_each for call in of_each}) == 1
        assert [c.num_real for c in of_each] == list(of_each[0].num_real_of_each)
        for first in range(0, plan.samples_per_call, plan.samples_per_update):
            for call in of_each:  # processes divide each pass
                rows = slice(first, first + plan.samples_per_update)
                seen += call.batch[0][: call.num_real][rows].tolist()
    expected = min(50, most or 50)
    assert len(set(seen)) == len(seen) == expected
    if kind in ("generator", "iterable", "samples", "loader of samples"):
        assert seen == list(range(expected))


@pytest.mark.parametrize(
    "kind",
    [
        *("shuffled iterable", "loader", "loader with workers"),
        *("loader with a generator", "samples"),
    ],
)
def test_a_run_goes_on_in_the_middle_of_a_pass(kind):
    plan = BatchPlan(6)

    def whole(processes):
        batches = training(plan, WHOLE[kind](), processes)
        calls = iter(batches)
        begun = [next(calls) for _ in range(2)]
        place = batches.state_dict()
        rest = [*calls, *batches]
        processes.first(None)  # all have come here
        return [c.batch[0].tolist() for c in begun + rest], place

    results = together(2, in_turn(whole))

    def resumed(processes):
        numbers, _ = results[processes.index]
        batches = training(plan, WHOLE[kind](), processes)
        batches.load_state_dict(results[0][1])
        rest = [c.batch[0].tolist() for _ in range(2) for c in batches]
        assert rest == numbers[2:]

    together(2, in_turn(resumed))


# Loaders that are divided already -------------------------------------------------


def test_a_distributed_sampler_has_divided_the_samples():
    numbers = torch.arange(48)

    def run(processes):
        dataset = TensorDataset(numbers, -numbers)
        sampler = DistributedSampler(dataset, 2, processes.index, shuffle=False)
        loader = DataLoader(dataset, batch_size=5, sampler=sampler)
        batches = training(BatchPlan(6), loader, processes)
        assert batches.num_calls == 4
        return [n for call in batches for n in call.batch[0].tolist()]

    assert together(2, run) == [list(range(0, 48, 2)), list(range(1, 48, 2))]


def test_a_sampler_of_another_number_of_processes_is_refused():
    def run(processes):
        dataset = TensorDataset(torch.arange(48))
        sampler = DistributedSampler(dataset, 3, processes.index)
        as_source(DataLoader(dataset, sampler=sampler), processes=processes)

    with pytest.raises(DataError, match="between 3 processes, and there are 2"):
        together(2, run)


def test_a_loader_of_poptorch_must_be_made_for_all_processes():
    def run(processes):
        loader = poptorch.DataLoader(poptorch.Options(), TensorDataset(torch.arange(8)))
        as_source(loader, processes=processes)

    with pytest.raises(DataError, match="between 1 processes, and there are 2"):
        together(2, run)


def test_a_loader_of_poptorch_has_divided_the_samples():
    def run(processes):
        options = poptorch.Options()
        options.Distributed.configureProcessId(processes.index, 2)
        numbers = torch.arange(48)
        loader = poptorch.DataLoader(options, TensorDataset(numbers, -numbers), 6)
        batches = training(BatchPlan(6), loader, processes)
        return [n for call in batches for n in call.batch[0].tolist()]

    assert together(2, run) == [list(range(24)), list(range(24, 48))]


def test_samples_that_differ_unasked_are_refused():
    def run(processes):
        data = [torch.arange(6) + processes.index]
        as_source((one for one in data), processes=processes)

    with pytest.raises(DataError, match="begins with other samples"):
        together(2, run)


def test_rows_that_a_collate_function_makes_are_divided():
    def twice(samples):
        numbers = torch.stack([x for x, _ in samples])
        return torch.cat([numbers, numbers + 100])

    def make():
        numbers = torch.arange(24)
        return DataLoader(
            TensorDataset(numbers, -numbers), batch_size=6, collate_fn=twice
        )

    with pytest.warns(WholeStreamWarning):
        [calls], _ = passes(2, BatchPlan(6), make)
    seen = [n for own in calls for call in own for n in call.batch[0].tolist()]
    assert sorted(seen) == [*range(24), *range(100, 124)]


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
        assert not batches.source.is_part
        return numbers_of(batches)

    with pytest.warns(WholeStreamWarning, match="reads all of `x`"):
        seen = together(2, run)
    assert sorted(joined(seen)) == list(range(32))


def test_a_dataset_in_a_loader_of_poptorch_divides_itself():
    def run(processes):
        loader = unpartitioned(processes, OwnNumbers(32))
        batches = inference(BatchPlan(4), loader, processes)
        assert batches.source.is_part
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
