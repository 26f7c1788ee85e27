# SPDX-License-Identifier: Apache-2.0
"""Batches from processes that load are those that torch's own loader brings."""

from __future__ import annotations

import gc
import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ipufit import poptorch
from ipufit.data import workers as carrying
from ipufit.data.workers import Carrier, carried, slots_of
from tests.strategies import spread

Pair = namedtuple("Pair", ["left", "right"])


class Drawing(Dataset):
    """Samples that draw random numbers of their process."""

    def __init__(self, count=23):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
        return torch.tensor([float(index), *drawn]), index


class Stream(IterableDataset):
    """The same number of samples from one process, and one from the others."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        yield from ((torch.full((3,), float(i)), info.id) for i in range(1, 24))


def as_nested(samples):
    x, y = torch.utils.data.default_collate(samples)
    return {"x": [x, Pair(y, "word")], "count": len(samples), 3: (x[:0], x.sum())}


def of_any_shape(samples):
    """Batches of three shapes, and one that isn't contiguous."""
    x, _ = torch.utils.data.default_collate(samples)
    width = 1 + int(x[0, 0]) % 3
    return [x[:, :width].contiguous(), x.t(), x[0, 0].item(), None]


def as_itself(samples):
    return samples[0]


def passes(begin, dataset, seed=3, **settings):
    """All batches of two passes, kept until the end."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    loader = DataLoader(dataset, **settings)
    return [[list(begin(loader)) for _ in range(2)], torch.rand(3)]


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for element, others in zip(one, other):
            assert_same(element, others)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("dataset", "settings"),
    spread(
        [
            (Drawing(), {"num_workers": 2, "batch_size": 2, "shuffle": True}),
            (Drawing(), {"num_workers": 1, "collate_fn": as_nested, "batch_size": 3}),
            (Drawing(), {"num_workers": 1, "batch_size": 2, "prefetch_factor": 1}),
            (Drawing(7), {"num_workers": 2, "collate_fn": as_itself, "batch_size": 1}),
            (Stream(), {"num_workers": 2, "batch_size": 2}),
            (Drawing(), {"num_workers": 0, "batch_size": 4}),
            (Drawing(), {"num_workers": 1, "collate_fn": of_any_shape}),
            (
                Drawing(),
                {"num_workers": 2, "batch_size": 2, "persistent_workers": True},
            ),
        ]
    ),
)
def test_batches_are_those_of_torchs_loader(dataset, settings):
    assert_same(passes(carried, dataset, **settings), passes(iter, dataset, **settings))


def test_a_loader_is_left_as_it_was():
    loader = DataLoader(Drawing(4), 2, num_workers=1, collate_fn=as_nested)
    batches = carried(loader)
    assert loader.collate_fn is as_nested
    assert len(list(batches)) == 2


def test_processes_that_go_on_give_whole_batches_to_their_owner_too():
    loader = DataLoader(Drawing(6), 2, num_workers=1, persistent_workers=True)
    begun = carried(loader)
    next(begun)  # and the rest is left
    first = [batch[1].tolist() for batch in loader]
    assert first == [batch[1].tolist() for batch in carried(loader)]
    assert first == [[0, 1], [2, 3], [4, 5]]


def test_other_iterables_and_loaders_begin_as_they_do():
    class Own(DataLoader):
        def __iter__(self):
            yield self.collate_fn is as_itself

    assert list(carried([1, 2])) == [1, 2]
    assert list(carried(Own(Drawing(), num_workers=1, collate_fn=as_itself))) == [True]


def test_memory_is_kept_no_longer_than_the_pass():
    before = len(carrying._carriers)
    batches = carried(DataLoader(Drawing(4), 2, num_workers=1))
    assert len(carrying._carriers) == before + 1
    kept = list(batches)
    del batches
    gc.collect()
    assert len(carrying._carriers) == before
    assert [batch[1].tolist() for batch in kept] == [[0, 1], [2, 3]]


def test_streams_have_more_batches_on_the_way():
    settings = {"num_workers": 2, "prefetch_factor": 4}
    assert slots_of(DataLoader(Drawing(), **settings)) == 5
    assert slots_of(DataLoader(Stream(), **settings)) == 9


def test_batches_of_poptorchs_loader_are_whole_calls():
    options = poptorch.Options().deviceIterations(2)
    settings = {"batch_size": 2, "num_workers": 1, "persistent_workers": False}
    loader = poptorch.DataLoader(options, Drawing(9), **settings)
    calls = [batch[1].tolist() for batch in carried(loader)]
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_batch_of_this_process_stays_what_it_is():
    carrier = Carrier(list, 3)
    x = torch.rand(2)
    assert carrier([x])[0] is x
