# SPDX-License-Identifier: Apache-2.0
"""`__getitems__` is used where it gives what `__getitem__` gives."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from ipufit import CachedDataset, IPUConfig, IPUModel
from ipufit.data.calls import collate
from ipufit.data.datasets import FlatDataset, Parts, SeededRows
from ipufit.data.structure import SampleStructure


class Squares(Dataset):
    """Counts the samples that are read singly, and those that are read together."""

    def __init__(self, count=24):
        self.count = count
        self.num_single = self.num_together = 0

    def __len__(self):
        return self.count

    def sample(self, index):
        return torch.full((2,), float(index) ** 2), index % 3

    def __getitem__(self, index):
        self.num_single += 1
        return self.sample(index)

    def __getitems__(self, indices):
        self.num_together += len(indices)
        return [self.sample(index) for index in indices]


class Doubled(Squares):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return 2 * x, y


class Drawing(Squares):
    def sample(self, index):
        return torch.full((2,), float(index)) + torch.rand(2), int(np.random.rand() * 3)


class SometimesDrawing(Squares):
    def sample(self, index):
        noise = random.random() if index > 9 else 0.0
        return torch.full((2,), index + noise), index % 3


class Wrong(Squares):
    def __getitems__(self, indices):
        return [self.sample(index + 1) for index in indices]


class Failing(Squares):
    def __getitems__(self, indices):
        raise NotImplementedError


class OfItsSeed(Squares):
    def sample(self, index):
        return torch.full((2,), float(torch.initial_seed() % 1000)), index % 3


class Short(Squares):
    def __getitems__(self, indices):
        return super().__getitems__(indices[:2])


class WrongAtTheEnd(Squares):
    def __getitems__(self, indices):
        *most, _ = super().__getitems__(indices)
        return [*most, most[0]]


def flat_of(dataset):
    structure = SampleStructure.of(Parts()(dataset[0]))
    flat = FlatDataset(dataset, Parts(), structure, "x")
    flat[0]
    return flat


def batches(flat, size=4, seed=None):
    """All batches, and what is drawn afterwards."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    rows = flat if seed is None else SeededRows(flat, seed)
    parts = torch.arange(len(flat)).split(size)
    found = [collate(rows.__getitems__(part.tolist())) for part in parts]
    return found, (random.random(), np.random.rand(), float(torch.rand(())))


def singly(dataset, size=4, seed=None):
    """The same without `__getitems__`."""
    flat = flat_of(dataset)
    flat._reader._is_used = False
    return batches(flat, size, seed)


KINDS = [
    *(Squares, Doubled, Drawing, SometimesDrawing, Wrong, Failing, OfItsSeed, Short),
    WrongAtTheEnd,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "count"), [(1, 24), (4, 24), (50, 130), (90, 90)])
@pytest.mark.parametrize("seed", [None, 7])
def test_batches_and_random_states_are_those_of_single_samples(kind, size, count, seed):
    found, after = batches(flat_of(kind(count)), size, seed)
    expected, expected_after = singly(kind(count), size, seed)
    if seed is None:  # else each sample seeds, and no state is kept
        assert after == expected_after
    for batch, other in zip(found, expected):
        assert all(map(torch.equal, batch, other))


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("subset", [False, True])
def test_samples_are_read_together_after_the_first_batch(seed, subset):
    dataset = Squares()
    given = Subset(Subset(dataset, range(20)), list(range(19, -1, -1)))
    flat = flat_of(given if subset else dataset)
    read = dataset.num_single
    found, _ = batches(flat, 4, seed)
    assert dataset.num_single == read + 4
    assert dataset.num_together == len(flat)
    if subset:
        assert found[0][0][:, 0].tolist() == [19.0**2, 18.0**2, 17.0**2, 16.0**2]


@pytest.mark.parametrize("size", [33, 200, 1000])
@pytest.mark.parametrize("seed", [None, 7])
def test_few_samples_of_a_large_batch_are_read_twice(size, seed):
    dataset = Squares(1000)
    flat = flat_of(dataset)
    read = dataset.num_single
    batches(flat, size, seed)
    assert dataset.num_together == 1000
    assert dataset.num_single == read + 32 + (1000 % size == 1)  # the last is alone


@pytest.mark.parametrize("method", ["evaluate", "predict", "fit"])
def test_data_are_read_once(method):
    model = IPUModel(torch.nn.Linear(2, 3), IPUConfig(seed=4))
    model.compile("sgd", "cross_entropy")
    run = getattr(model, method)
    together, single = Squares(320), Failing(320)
    run(together, batch_size=32, verbose=0)
    run(single, batch_size=32, verbose=0)
    few = 3  # that the shapes are known from
    assert together.num_together == 320
    assert together.num_single <= 32 + few
    assert 320 <= single.num_single <= 320 + 32 + few


@pytest.mark.parametrize("method", ["evaluate", "predict", "fit"])
def test_a_generator_is_asked_for_each_batch_once(method):
    model = IPUModel(torch.nn.Linear(2, 3), IPUConfig(seed=4))
    model.compile("sgd", "cross_entropy")
    drawn = []

    def batches():
        for number in range(10):
            drawn.append(number)
            yield torch.zeros(32, 2), torch.zeros(32, dtype=torch.int64)

    steps = {"steps_per_epoch": 10} if method == "fit" else {}
    getattr(model, method)(batches(), verbose=0, **steps)
    assert drawn == list(range(10))


def test_a_larger_batch_is_tried_too():
    class WrongIfLarge(Squares):
        def __getitems__(self, indices):
            return [self.sample(index + (len(indices) > 4)) for index in indices]

    flat = flat_of(WrongIfLarge())
    for indices in ([3], [1, 2, 3, 4], [5, 6], [*range(8)], [*range(8, 16)]):
        x, _ = collate(flat.__getitems__(indices))
        assert x[:, 0].tolist() == [float(index) ** 2 for index in indices]


def test_a_class_that_inherits_getitems_is_read_by_its_own_getitem():
    dataset = Doubled()
    batches(flat_of(dataset))
    assert dataset.num_together == 0


class OwnSubset(Subset):
    def __getitem__(self, index):
        return torch.zeros(2), 0

    def __getitems__(self, indices):  # torch insists on it
        return [self[index] for index in indices]


def test_a_subset_that_does_more_is_read_by_itself():
    dataset = Squares()
    batches(flat_of(OwnSubset(dataset, range(8))))
    assert dataset.num_together == 0


@pytest.mark.parametrize("config", [{}, {"num_workers": 1}])
def test_a_fit_is_the_same_with_getitems_and_without(config):
    losses = []
    for kind in (Squares, Failing, lambda: CachedDataset(Squares())):
        torch.manual_seed(2)
        model = IPUModel(torch.nn.Linear(2, 3), IPUConfig(seed=4, **config))
        model.compile("sgd", "cross_entropy")
        run = model.fit(kind(), batch_size=4, epochs=2, verbose=0)
        losses.append(run.history["loss"])
    assert losses[0] == losses[1] == losses[2]
