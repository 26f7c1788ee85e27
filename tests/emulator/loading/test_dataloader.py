# SPDX-License-Identifier: Apache-2.0
"""Combined batches: their size, order, last one, and how modes and processes differ."""

import gc
import logging
import os

import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from ipufit.emulator import (
    CommGroupType,
    DataLoader,
    DataLoaderMode,
    Error,
    Options,
    SharingStrategy,
    registerCustomArgParser,
)
from tests.emulator._datasets import (
    IndexStream,
    Indices,
    Pair,
    PairParser,
    keep_shares,
)
from tests.strategies import examples

pytestmark = pytest.mark.floor

FORK = {"sharing_strategy": SharingStrategy.Fork}
MODES = list(DataLoaderMode)
FEW_PROCESSORS = pytest.mark.filterwarnings("ignore:This DataLoader will create 2")


@pytest.fixture
def load():
    """Makes loaders; those with a process fork it, and end it after the test."""
    loaders = []

    def make(options, dataset, *args, mode=DataLoaderMode.Sync, **kwargs):
        if mode != DataLoaderMode.Sync:
            kwargs.setdefault("async_options", FORK)
        loader = DataLoader(options, dataset, *args, mode=mode, **kwargs)
        loaders.append(loader)
        return loader

    yield make
    for loader in loaders:
        loader.terminate()


def layout(iterations=1, accumulation=1, replicas=1, group=1):
    options = Options().deviceIterations(iterations).replicationFactor(replicas)
    if group != 1:
        options.inputReplicaGrouping(group, CommGroupType.Consecutive)
    options.Training.gradientAccumulation(accumulation)
    return options


def process(index, count, **kwargs):
    options = layout(**kwargs)
    options.Distributed.configureProcessId(index, count)
    return options


def read(loader):
    return [batch.tolist() for batch in loader]


def in_batches_of_two(size, *, drop_last=False):
    return BatchSampler(SequentialSampler(range(size)), 2, drop_last)


# The combined batch ----------------------------------------------------------


@pytest.mark.parametrize(("group", "expected"), [(1, 120), (2, 60)])
def test_the_combined_batch_is_the_product_of_all_factors(group, expected):
    # Numbers from PopTorch 3.4: B=5, D=2, G=3, R=4.
    options = layout(2, 3, 4, group)
    loader = DataLoader(options, Indices(240), batch_size=5)
    assert loader.combinedBatchSize == expected
    assert loader.batch_size == expected
    assert {len(batch) for batch in loader} == {expected}


@settings(max_examples=examples(40))
@given(
    st.integers(0, 50),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
)
def test_calls_and_drops_make_up_all_samples(size, batch, iterations, replicas, drop):
    options = layout(iterations, 1, replicas)
    loader = DataLoader(options, Indices(size), batch, drop_last=drop)
    batches = list(loader)
    combined = batch * iterations * replicas
    num_read = size // combined * combined if drop else size
    assert [int(x) for rows in batches for x in rows] == list(range(num_read))
    assert len(batches) == len(loader)


# Options ---------------------------------------------------------------------


# The last batch --------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_last_batch_can_be_kept(load, caplog, mode):
    loader = load(layout(2), Indices(11), 2, drop_last=False, mode=mode)
    assert len(loader) == 3
    for _ in range(2):
        assert read(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "11 elements, which isn't a multiple of 4" in record.getMessage()


# Without batches -------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_elements_pass_unchanged_without_a_batch_size(load, mode):
    options = layout(4)
    loader = load(options, Indices(3), None, drop_last=False, mode=mode)
    assert read(loader) == [0, 1, 2]
    assert loader.combinedBatchSize is None
    with pytest.raises(AttributeError, match="options"):
        _ = loader.options
    with pytest.raises(AttributeError, match="frozen"):
        options.deviceIterations(2)


def test_only_rebatching_overlooks_the_default_drop_last_without_a_batch_size(load):
    with pytest.raises(ValueError, match="auto-batching"):
        DataLoader(Options(), Indices(3), None)
    with pytest.raises(ValueError, match="auto-batching"):
        DataLoader(Options(), Indices(3), None, mode=DataLoaderMode.Async)
    loader = load(Options(), Indices(3), None, mode=DataLoaderMode.AsyncRebatched)
    assert read(loader) == [0, 1, 2]


# Batch samplers --------------------------------------------------------------


def test_the_structure_of_micro_batches_is_kept():
    dataset = [
        {"x": torch.tensor([i]), "pair": (torch.tensor(i), "label")} for i in range(4)
    ]
    registerCustomArgParser(Pair, PairParser())

    def collate(samples):
        batch = torch.utils.data.default_collate(samples)
        return {"custom": Pair(batch["x"], batch["x"] + 1), "pair": batch["pair"]}

    try:
        loader = DataLoader(
            layout(2), dataset, batch_sampler=in_batches_of_two(4), collate_fn=collate
        )
        (batch,) = loader
    finally:
        registerCustomArgParser(Pair, None)
    assert batch["custom"].left.flatten().tolist() == [0, 1, 2, 3]
    assert batch["custom"].right.flatten().tolist() == [1, 2, 3, 4]
    assert batch["pair"][0].tolist() == [0, 1, 2, 3]


def test_an_incomplete_group_of_micro_batches_is_warned_of(caplog):
    DataLoader(layout(2), Indices(8), batch_sampler=in_batches_of_two(8))
    assert caplog.records == []
    DataLoader(layout(2), Indices(10), batch_sampler=in_batches_of_two(10))
    assert "5 micro-batches" in caplog.text
    unsized = torch.utils.data.BatchSampler(iter(range(4)), 2, drop_last=True)
    for sampler in (iter([[0, 1], [2, 3]]), unsized):
        caplog.clear()
        DataLoader(layout(2), Indices(10), batch_sampler=sampler)
        assert "an unknown number of micro-batches" in caplog.text


@pytest.mark.parametrize(
    ("options", "kwargs"),
    [
        (Options(), {"batch_size": 2}),
        (Options(), {"batch_size": None}),
        (Options(), {"shuffle": True}),
        (process(0, 2), {}),
    ],
    ids=["batch_size", "no batch_size", "shuffle", "processes"],
)
def test_a_batch_sampler_excludes_what_it_decides(options, kwargs):
    with pytest.raises(Error, match="batch_sampler"):
        DataLoader(options, Indices(4), batch_sampler=in_batches_of_two(4), **kwargs)


# Iterable datasets -----------------------------------------------------------


@FEW_PROCESSORS
def test_workers_that_repeat_an_iterable_dataset_are_warned_of(caplog):
    loader = DataLoader(
        Options(), IndexStream(3), num_workers=2, persistent_workers=False
    )
    assert "Each of the 2 workers" in caplog.text
    assert read(loader) == [[0], [0], [1], [1], [2], [2]]


@FEW_PROCESSORS
def test_only_rebatching_joins_what_workers_have_left(load, caplog):
    # 14 elements in shares of 7; batches of 4.
    def rows(mode):
        loader = load(
            Options(),
            IndexStream(14, is_shared=True),
            4,
            num_workers=2,
            persistent_workers=False,
            worker_init_fn=keep_shares,
            mode=mode,
        )
        return [len(batch) for batch in loader]

    assert rows(DataLoaderMode.Async) == [4] * 2
    assert rows(DataLoaderMode.AsyncRebatched) == [4] * 3
    assert caplog.records == []


# Modes -----------------------------------------------------------------------


def test_a_dataset_can_be_shuffled_in_the_process(load):
    expected = []
    for mode in (DataLoaderMode.Sync, DataLoaderMode.Async):
        torch.manual_seed(3)
        loader = load(Options(), Indices(30), 5, shuffle=True, mode=mode)
        expected.append(read(loader))
        first, second = read(loader), read(loader)
        assert first != second
        assert sorted(x for batch in first for x in batch) == list(range(30))
    assert expected[0] == expected[1]


def test_only_rebatching_has_a_say_on_the_batches_of_workers(load):
    loader = load(Options(), Indices(4), 2, rebatched_worker_size=1000)
    assert loader.batch_size == 2
    assert not hasattr(loader, "rebatched_drop_last")
    with pytest.raises(AssertionError, match="rebatched_worker_size = 3"):
        DataLoader(
            Options(),
            Indices(4),
            2,
            mode=DataLoaderMode.AsyncRebatched,
            rebatched_worker_size=3,
        )


def test_a_terminated_loader_cannot_be_iterated_over(load):
    loader = load(Options(), Indices(3), mode=DataLoaderMode.Async)
    loader.terminate()
    loader.terminate()
    with pytest.raises(AssertionError, match="was terminated"):
        iter(loader)
    synchronous = load(Options(), Indices(2))
    synchronous.terminate()
    assert read(synchronous) == [[0], [1]]


def test_the_process_ends_with_the_loader():
    loader = DataLoader(
        Options(), Indices(3), mode=DataLoaderMode.Async, async_options=FORK
    )
    pid = loader._accessor._process.pid
    gc.disable()  # so that a cycle would not be found
    try:
        del loader
    finally:
        gc.enable()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# Several processes -----------------------------------------------------------


@pytest.mark.parametrize("mode", [DataLoaderMode.Sync, DataLoaderMode.Async])
def test_epochs_of_all_processes_are_shuffled_together(load, mode):
    # Numbers from PopTorch 3.4.
    loaders = [
        load(process(index, 2).randomSeed(42), Indices(10), 2, shuffle=True, mode=mode)
        for index in range(2)
    ]
    assert [read(loader) for loader in loaders] == [
        [[1, 8], [4, 5]],
        [[0, 9], [3, 7]],
    ]
    assert [read(loader) for loader in loaders] == [
        [[3, 5], [8, 9]],
        [[4, 6], [1, 0]],
    ]


@pytest.mark.parametrize(
    ("is_persistent", "second_epoch"),
    [(False, [[3, 5], [8, 9]]), (True, [[8, 9], [4, 6]])],
)
def test_persistent_workers_keep_the_offset_of_their_first_epoch(
    is_persistent, second_epoch
):
    # As in PopTorch: the permutation is shared with them, the offset isn't.
    loader = DataLoader(
        process(0, 2).randomSeed(42),
        Indices(10),
        2,
        shuffle=True,
        num_workers=1,
        persistent_workers=is_persistent,
    )
    assert read(loader) == [[1, 8], [4, 5]]
    assert read(loader) == second_epoch


@pytest.mark.parametrize(
    ("dataset", "kwargs", "message"),
    [
        (Indices(10), {"shuffle": True}, "randomSeed"),
        (Indices(10), {"batch_size": None, "drop_last": False}, "batch_size=None"),
        (IndexStream(10), {}, "auto_distributed_partitioning=False"),
    ],
)
def test_what_processes_cannot_share_is_refused(dataset, kwargs, message):
    with pytest.raises(AssertionError, match=message):
        DataLoader(process(0, 2), dataset, **kwargs)


@pytest.mark.parametrize("dataset", [Indices(4), IndexStream(4)])
def test_every_process_reads_everything_if_it_partitions_itself(dataset):
    loader = DataLoader(process(1, 2), dataset, 2, auto_distributed_partitioning=False)
    assert read(loader) == [[0, 1], [2, 3]]
    assert loader.dataset is dataset


# One process's share of a dataset ---------------------------------------------------


class RecordingDataset:
    """A dataset whose elements are their own indices; it keeps what it was asked."""

    def __init__(self, size):
        self.size = size
        self.indices = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.indices.append(index)
        return int(index)


def loader_of(dataset, process, num_processes, batch, *, drop_last=True, seed=None):
    options = Options()
    options.Distributed.configureProcessId(process, num_processes)
    if seed is not None:
        options.createOrSet(random_seed=seed)
    shuffle = seed is not None
    return DataLoader(options, dataset, batch, shuffle=shuffle, drop_last=drop_last)


def loaders(size, batch, num_processes, **settings):
    return [
        loader_of(RecordingDataset(size), process, num_processes, batch, **settings)
        for process in range(num_processes)
    ]


def elements(loader):
    return [element for batch in loader for element in batch.tolist()]


def test_too_little_data_for_one_call_each_is_an_error():
    with pytest.raises(ZeroDivisionError, match="takes 8 = 4 per process"):
        loaders(7, 4, 2)


def test_leftovers_are_the_remainder_by_the_block_length():
    # 40 % 10 == 0, although 10 elements are outside all blocks: as in PopTorch.
    permutation = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert elements(loaders(40, 5, 3, seed=0)[0]) == permutation[:10].tolist()


@pytest.mark.parametrize("index", [-1, 2])
def test_a_block_does_not_show_what_is_outside_it(index):
    share = loaders(4, 1, 2)[0].dataset
    with pytest.raises(IndexError, match="this process's 2 elements"):
        share[index]


sizes = st.tuples(st.integers(1, 60), st.integers(1, 5), st.integers(2, 4)).filter(
    lambda drawn: drawn[0] >= drawn[1] * drawn[2]
)


@settings(max_examples=examples(50))
@given(sizes, st.integers(0, 3), st.booleans())
def test_no_element_is_seen_twice_in_an_epoch(drawn, num_shuffles, drop_last):
    size, batch, num_processes = drawn
    seed = 7 if num_shuffles else None
    blocks = loaders(size, batch, num_processes, drop_last=drop_last, seed=seed)
    for _ in range(max(1, num_shuffles)):
        seen = [element for loader in blocks for element in elements(loader)]
        assert len(set(seen)) == len(seen)
        if drop_last:
            assert len(seen) == size // (batch * num_processes) * batch * num_processes
        else:
            assert set(seen) == set(range(size))
