# SPDX-License-Identifier: Apache-2.0
"""`__getitems__` reads the samples of a dataset that has it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset, Subset

from ipufit import CachedDataset, DataError, IPUConfig
from tests import reference


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


class Single(Squares):
    __getitems__ = None


class Doubled(Squares):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return 2 * x, y


class OwnSubset(Subset):
    def __getitem__(self, index):
        return torch.zeros(2), 0

    def __getitems__(self, indices):  # torch insists on it
        return [self[index] for index in indices]


class Short(Squares):
    def __getitems__(self, indices):
        return super().__getitems__(indices[:2])


class Noise(Squares):
    def sample(self, index):
        return torch.rand(2), index % 3


FEW = 3  # samples that shapes are known from


def model_of(**config):
    torch.manual_seed(2)
    return reference.compiled(torch.nn.Linear(2, 3), IPUConfig(seed=4, **config))


@pytest.mark.parametrize("method", ["predict", "fit"])
def test_samples_are_read_together_and_once(method):
    run = getattr(model_of(), method)
    together, single = Squares(64), Single(64)
    run(together, batch_size=8, verbose=0)
    run(single, batch_size=8, verbose=0)
    assert (together.num_together, together.num_single <= FEW) == (64, True)
    assert 64 <= single.num_single <= 64 + FEW


@pytest.mark.parametrize("kind", [Doubled, lambda: OwnSubset(Squares(), range(8))])
def test_a_getitem_of_a_subclass_is_not_passed_over(kind):
    dataset = kind()
    model_of().predict(dataset, verbose=0)
    assert getattr(dataset, "dataset", dataset).num_together == 0


def test_a_subset_reads_those_of_its_dataset():
    dataset = Squares()
    chosen = Subset(Subset(dataset, range(20)), list(range(19, -1, -1)))
    model = model_of()
    seen = model.predict(chosen, batch_size=4, verbose=0)
    assert dataset.num_together == 20
    assert dataset.num_single <= FEW
    whole = model.predict(Single(20), batch_size=4, verbose=0)
    assert torch.equal(seen, whole.flip(0))


def test_too_few_samples_are_refused():
    with pytest.raises(DataError, match="gave 2 samples for 4 indices"):
        model_of().fit(Short(), batch_size=4, verbose=0)


@pytest.mark.parametrize("config", [{}, {"num_workers": 1}])
def test_a_fit_is_the_same_with_getitems_and_without(config):
    losses = []
    for kind in (Squares, Single, lambda: CachedDataset(Squares())):
        run = model_of(**config).fit(kind(), batch_size=4, epochs=2, verbose=0)
        losses.append(run.history["loss"])
    assert losses[0] == losses[1] == losses[2]


def test_random_numbers_of_a_batch_are_seeded_in_processes_that_load():
    losses = [
        model_of(num_workers=workers).fit(Noise(), batch_size=4, epochs=2, verbose=0)
        for workers in (1, 2)
    ]
    assert losses[0].history == losses[1].history
