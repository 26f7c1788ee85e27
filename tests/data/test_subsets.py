# SPDX-License-Identifier: Apache-2.0
"""Subsets of data in memory are gathered, as they would be loaded one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from ipufit import BatchPlan, CachedDataset, DataError
from ipufit.data.calls import InferenceBatches, Loading, TrainingBatches
from ipufit.data.datasets import ArrayDataset, arrays_behind
from ipufit.data.sources import as_source
from tests.data.test_division import options_for
from tests.strategies import examples, plans


class Single(Dataset):
    """The samples of a dataset, which can only be read one by one."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]


class Own(TensorDataset):
    """A subclass that does more."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return 2 * x, y


def tensors(count=20):
    return torch.arange(3.0 * count).reshape(count, 3), torch.arange(count)


def assert_same(one, other):
    assert type(one) is type(other)
    assert len(one.batch) == len(other.batch)
    assert one[1:] == other[1:]
    for leaf, others in zip(one.batch, other.batch):
        assert leaf.dtype == others.dtype
        assert torch.equal(leaf, others)


def calls_of(dataset, plan, passes=2, **arguments):
    """All calls of training and of inference, and what is drawn afterwards."""
    torch.manual_seed(4)
    random.seed(4)
    np.random.seed(4)
    source = as_source(dataset)
    training = TrainingBatches(source, plan, options_for(plan), **arguments)
    inference = InferenceBatches(
        as_source(dataset),
        BatchPlan(plan.micro_batch_size),
        options_for(BatchPlan(plan.micro_batch_size)),
        loading=arguments.get("loading", Loading()),
    )
    found = [
        call
        for batches in (training, inference)
        for _ in range(passes)
        for call in batches
    ]
    training.close()
    inference.close()
    return found, (random.random(), np.random.rand(), float(torch.rand(())))


indices = st.lists(st.integers(-20, 19), min_size=4, max_size=30)


@given(plans(most=2), indices, st.booleans(), st.sampled_from(["pad", True]))
@settings(max_examples=examples(100))
def test_calls_and_random_states_are_those_of_single_samples(
    plan, chosen, shuffle, drop_last
):
    if drop_last is True and len(chosen) < plan.samples_per_call:
        return
    whole = TensorDataset(*tensors())
    arguments = {"shuffle": shuffle, "drop_last": drop_last}
    for subset in (
        Subset(whole, chosen),
        Subset(Subset(CachedDataset(whole), range(1, 20)), [i % 19 for i in chosen]),
    ):
        found, after = calls_of(subset, plan, **arguments)
        expected, expected_after = calls_of(Single(subset), plan, **arguments)
        assert after == expected_after
        assert len(found) == len(expected) > 0
        for call, other in zip(found, expected):
            assert_same(call, other)


def test_parts_of_a_split_share_its_memory():
    whole = TensorDataset(*tensors())
    for part in random_split(whole, [15, 5]):
        dataset = as_source(part).dataset
        assert dataset.tensors[0].data_ptr() == whole.tensors[0].data_ptr()


def test_other_datasets_are_read_sample_by_sample():
    x, y = tensors()

    class OwnSubset(Subset):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    for dataset in (
        Subset(Own(x, y), range(4)),
        OwnSubset(TensorDataset(x, y), range(4)),
        Subset(Single(TensorDataset(x, y)), range(4)),
        Subset(TensorDataset(x.double(), y), range(4)),
        Own(x, y),
    ):
        assert type(as_source(dataset).dataset) is not ArrayDataset
    for odd in (range(0), [True, False], [0.0], [25]):
        assert arrays_behind(Subset(TensorDataset(x, y), odd)) is None


def test_only_numbers_of_the_subset_must_fit_32_bits():
    x = torch.tensor([1, 2**40, 3])
    assert as_source(Subset(TensorDataset(x, x), [0, 2])).num_samples == 2
    with pytest.raises(DataError, match=rf"Sample 1 of `x` has {2**40}"):
        as_source(Subset(TensorDataset(x, x), [2, 1]))
