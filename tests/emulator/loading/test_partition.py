# SPDX-License-Identifier: Apache-2.0
"""One process's share of a dataset: blocks, leftovers and the common shuffle."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit.emulator._loading.partition import Partition
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
        return [("batched", int(index)) for index in indices]


def elements(share):
    return [share[index] for index in range(len(share))]


def shares(size, batch, num_processes, *, drop_last=True, seed=None):
    return [
        Partition(
            range(size), process, num_processes, batch, drop_last=drop_last, seed=seed
        )
        for process in range(num_processes)
    ]


def test_all_blocks_have_as_many_full_batches_when_dropping():
    blocks = [elements(share) for share in shares(100, 4, 3)]
    assert [len(block) for block in blocks] == [32, 32, 32]
    assert [block[0] for block in blocks] == [0, 32, 64]


def test_the_first_blocks_are_longer_when_keeping():
    blocks = [elements(share) for share in shares(100, 4, 3, drop_last=False)]
    assert [len(block) for block in blocks] == [34, 33, 33]
    assert [block[0] for block in blocks] == [0, 34, 67]


def test_too_little_data_for_one_call_each_is_an_error():
    with pytest.raises(ZeroDivisionError, match="takes 8 = 4 per process"):
        Partition(range(7), 0, 2, 4, drop_last=True, seed=None)


def test_shuffled_epochs_are_those_of_poptorch():
    # Numbers from PopTorch 3.4: 10 elements, batch 2, 2 processes, seed 42.
    first, second = shares(10, 2, 2, seed=42)
    first.shuffle()
    second.shuffle()
    assert elements(first) == [1, 8, 4, 5]
    assert elements(second) == [0, 9, 3, 7]
    first.shuffle()
    second.shuffle()
    assert elements(first) == [3, 5, 8, 9]
    assert elements(second) == [4, 6, 1, 0]


def test_leftovers_are_the_remainder_by_the_block_length():
    # 40 % 10 == 0, although 10 elements are outside all blocks: as in PopTorch.
    share = shares(40, 5, 3, seed=0)[0]
    permutation = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    share.shuffle()
    assert elements(share) == permutation[:10].tolist()


def test_the_dataset_gets_plain_integers_unless_shuffled():
    dataset = RecordingDataset(4)
    share = Partition(dataset, 1, 2, 1, drop_last=True, seed=3)
    share[0]
    share.shuffle()
    share[0]
    plain, shuffled = dataset.indices
    assert type(plain) is int
    assert isinstance(shuffled, torch.Tensor)
    assert shuffled.dim() == 0


@pytest.mark.parametrize("index", [-1, 2])
def test_a_block_does_not_show_what_is_outside_it(index):
    share = Partition(range(4), 0, 2, 1, drop_last=True, seed=None)
    with pytest.raises(IndexError, match="this process's 2 elements"):
        share[index]


def test_batched_access_is_offered_exactly_if_the_dataset_has_it():
    plain = Partition(RecordingDataset(4), 1, 2, 1, drop_last=True, seed=None)
    batched = Partition(BatchedDataset(4), 1, 2, 1, drop_last=True, seed=None)
    assert not hasattr(plain, "__getitems__")
    assert batched.__getitems__([1, 0]) == [("batched", 3), ("batched", 2)]


def test_a_copy_in_another_process_goes_on_with_the_same_permutations():
    share = shares(10, 2, 2, seed=42)[0]
    share.shuffle()
    copy = pickle.loads(pickle.dumps(share))
    share.shuffle()
    copy.shuffle()
    assert elements(share) == elements(copy)


def test_a_shuffle_changes_the_permutation_in_its_place():
    # Persistent workers hold on to the memory of the first one.
    share = shares(10, 2, 2, seed=42)[0]
    share.shuffle()
    permutation = share._permutation
    before = permutation.tolist()
    share.shuffle()
    assert share._permutation is permutation
    assert permutation.is_shared()
    assert permutation.tolist() != before


sizes = st.tuples(st.integers(1, 60), st.integers(1, 5), st.integers(2, 4)).filter(
    lambda drawn: drawn[0] >= drawn[1] * drawn[2]
)


@settings(max_examples=examples(50))
@given(sizes, st.integers(0, 3), st.booleans())
def test_no_element_is_seen_twice_in_an_epoch(drawn, num_shuffles, drop_last):
    size, batch, num_processes = drawn
    blocks = shares(size, batch, num_processes, drop_last=drop_last, seed=7)
    for _ in range(num_shuffles):
        for share in blocks:
            share.shuffle()
    seen = [element for share in blocks for element in elements(share)]
    assert len(set(seen)) == len(seen)
    if drop_last:
        assert len(seen) == size // (batch * num_processes) * batch * num_processes
    else:
        assert set(seen) == set(range(size))
