# SPDX-License-Identifier: Apache-2.0
"""Samples that other processes load draw numbers of their own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ipufit import IPUConfig, IPUModel, LambdaCallback
from tests.reference import compiled


class Drawing(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
        return torch.tensor([float(index), *drawn]), torch.zeros(1)


class Seen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 1)
        self.register_buffer("sums", torch.zeros(4))

    def forward(self, x):
        self.sums.add_(x.sum(dim=0))
        return self.fc(x)


def sums(**config):
    torch.manual_seed(5)
    model = compiled(Seen(), **config, loss="mse")
    model.fit(Drawing(), batch_size=2, epochs=2, verbose=0)
    return torch.tensor(model.module.sums.tolist())


@pytest.mark.parametrize("config", [{"num_workers": 2}, {"loader_mode": "async"}])
def test_numbers_do_not_depend_on_the_processes(config):
    expected = sums(num_workers=1, seed=9)
    torch.testing.assert_close(sums(seed=9, **config), expected)
    assert not torch.allclose(sums(seed=10, **config), expected)


def test_runs_without_a_seed_differ_unless_torch_is_seeded():
    first = sums(num_workers=1)
    torch.testing.assert_close(sums(num_workers=1), first)


class OfEpoch(Dataset):
    """Samples that a callback changes in each epoch."""

    epoch = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((4,), float(self.epoch)), torch.zeros(1)


class Stream(OfEpoch, IterableDataset):
    def __iter__(self):
        return (self[index] for index in range(8))


class Same(OfEpoch):
    """A sampler whose order a callback changes."""

    def __iter__(self):
        return iter([self.epoch] * 8)


NUMBERS = TensorDataset(torch.arange(8.0)[:, None].expand(8, 4), torch.zeros(8, 1))


def with_sampler(sampler, **options):
    return DataLoader(NUMBERS, sampler=sampler, **options)


@pytest.mark.parametrize(
    ("data", "load", "num_workers"),
    [
        (OfEpoch, None, 0),
        (OfEpoch, "async", 1),
        (Stream, None, 1),
        (Stream, DataLoader, 0),
        (Same, with_sampler, 1),
    ],
)
def test_data_see_what_a_callback_sets(data, load, num_workers):
    data = of_callback = data()
    mode = "async" if load == "async" else "sync"
    if callable(load):
        data = load(data, batch_size=2, num_workers=num_workers)

    def set_epoch(epoch, logs):
        of_callback.epoch = epoch

    config = {} if callable(load) else {"num_workers": num_workers}
    model = compiled(Seen(), loader_mode=mode, **config, loss="mse")
    callback = LambdaCallback(on_epoch_begin=set_epoch)
    given = {"batch_size": 2, "callbacks": [callback], "verbose": 0}
    model.fit(data, epochs=4, initial_epoch=2, **given)
    assert model.module.sums.tolist() == [8 * (2 + 3)] * 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_pass_of_inference_draws_other_numbers(num_workers):
    model = IPUModel(torch.nn.Identity(), IPUConfig(num_workers=num_workers, seed=3))
    torch.manual_seed(1)
    first, second = (model.predict(Drawing(), verbose=0) for _ in range(2))
    assert not (first[:, 1:] == second[:, 1:]).any()
    torch.manual_seed(1)
    if num_workers:
        assert torch.equal(model.predict(Drawing(), verbose=0), first)
