# SPDX-License-Identifier: Apache-2.0
"""One process's share of a dataset: blocks, leftovers and the common shuffle."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit.emulator import DataLoader, Options
from tests.strategies import examples


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


class BatchedDataset(RecordingDataset):
    def __getitems__(self, indices):
        return [100 + int(index) for index in indices]


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


def test_the_first_blocks_are_longer_when_keeping():
    blocks = [elements(loader) for loader in loaders(100, 4, 3, drop_last=False)]
    assert [len(block) for block in blocks] == [34, 33, 33]
    assert [block[0] for block in blocks] == [0, 34, 67]


def test_too_little_data_for_one_call_each_is_an_error():
    with pytest.raises(ZeroDivisionError, match="takes 8 = 4 per process"):
        loaders(7, 4, 2)


def test_leftovers_are_the_remainder_by_the_block_length():
    # 40 % 10 == 0, although 10 elements are outside all blocks: as in PopTorch.
    permutation = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert elements(loaders(40, 5, 3, seed=0)[0]) == permutation[:10].tolist()


@pytest.mark.parametrize(("seed", "kind"), [(None, int), (3, torch.Tensor)])
def test_the_dataset_gets_plain_integers_unless_shuffled(seed, kind):
    dataset = RecordingDataset(4)
    elements(loader_of(dataset, 1, 2, 1, seed=seed))
    assert {type(index) for index in dataset.indices} == {kind}


@pytest.mark.parametrize("index", [-1, 2])
def test_a_block_does_not_show_what_is_outside_it(index):
    share = loaders(4, 1, 2)[0].dataset
    with pytest.raises(IndexError, match="this process's 2 elements"):
        share[index]


def test_batched_access_is_offered_exactly_if_the_dataset_has_it():
    assert not hasattr(loaders(4, 1, 2)[1].dataset, "__getitems__")
    batched = loader_of(BatchedDataset(4), 1, 2, 1).dataset
    assert batched.__getitems__([1, 0]) == [103, 102]


def test_a_copy_in_another_process_goes_on_with_the_same_permutations():
    loader = loaders(10, 2, 2, seed=42)[0]
    elements(loader)
    copy = pickle.loads(pickle.dumps(loader))
    assert elements(loader) == elements(copy)


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
