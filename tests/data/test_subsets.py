# SPDX-License-Identifier: Apache-2.0
"""Subsets of data in memory are gathered, as they would be loaded one by one."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

from ipufit import CachedDataset, DataError
from ipufit.data.arrays import ArrayDataset
from ipufit.data.datasets import arrays_behind
from ipufit.data.sources import as_source
from tests.reference import Items, compiled
from tests.strategies import config_for, examples, plans


class Own(TensorDataset):
    """A subclass that does more."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return 2 * x, y


def tensors(count=20):
    return torch.arange(3.0 * count).reshape(count, 3) / 30, torch.arange(count) % 3


def run(dataset, plan, **arguments):
    """Everything that a model says of a dataset, and what is drawn afterwards."""
    torch.manual_seed(4)
    random.seed(4)
    np.random.seed(4)
    model = compiled(torch.nn.Linear(3, 3), config_for(plan))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = model.fit(dataset, epochs=2, verbose=0, **arguments).history
    predicted = model.predict(dataset, batch_size=2, verbose=0)
    model.detach()
    drawn = random.random(), np.random.rand(), float(torch.rand(()))
    return history, predicted.tolist(), drawn


indices = st.lists(st.integers(-20, 19), min_size=4, max_size=30)


@given(plans(most=2), indices, st.booleans(), st.sampled_from(["pad", True]))
@settings(max_examples=examples(10))
def test_runs_and_random_states_are_those_of_single_samples(
    plan, chosen, shuffle, drop_last
):
    assume(drop_last == "pad" or len(chosen) >= plan.samples_per_call)
    whole = TensorDataset(*tensors())
    arguments = {"shuffle": shuffle, "drop_last": drop_last}
    for subset in (
        Subset(whole, chosen),
        Subset(Subset(CachedDataset(whole), range(1, 20)), [i % 19 for i in chosen]),
    ):
        expected = run(Items(subset), plan, **arguments)
        assert run(subset, plan, **arguments) == expected


def test_other_datasets_are_read_sample_by_sample():
    x, y = tensors()

    class OwnSubset(Subset):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    for dataset in (
        Subset(Own(x, y), range(4)),
        OwnSubset(TensorDataset(x, y), range(4)),
        Subset(Items(TensorDataset(x, y)), range(4)),
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
