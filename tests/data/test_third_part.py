# SPDX-License-Identifier: Apache-2.0
"""Datasets that return an index beside input and target, as torch's users write."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ipufit import IpufitWarning
from tests.reference import compiled

X, Y = torch.rand(16, 3), torch.arange(16) % 3


class Indexed(Dataset):
    def __init__(self, third):
        self.third = third

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index], self.third(index)


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(map(Indexed(int).__getitem__, range(len(X))))


def model(**settings):
    return compiled(torch.nn.Linear(3, 3), **settings)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Indexed(int),
        lambda: Indexed(torch.tensor),
        Streamed,
        lambda: DataLoader(Indexed(int), batch_size=8, shuffle=True),
        lambda: TensorDataset(X, Y, torch.arange(16)),
    ],
)
def test_weights_that_look_like_indices_are_said_once(make):
    with pytest.warns(IpufitWarning, match="third part.*make them floats") as caught:
        model().fit(make(), batch_size=8, epochs=3, verbose=0)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_evaluations_say_it_too():
    with pytest.warns(IpufitWarning, match="third part"):
        model().evaluate(Indexed(int), batch_size=8, verbose=0)


def step(module, batch):
    x, y, _ = batch
    return torch.nn.functional.cross_entropy(module(x), y)


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (Indexed(float), {}),
        (Indexed(lambda index: index % 4), {}),  # counts
        (Indexed(lambda index: index > 3), {}),
        (Indexed(int), {"step": step, "loss": None}),  # it may do what it likes
    ],
)
def test_other_weights_are_taken_as_they_are(data, settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**settings).fit(data, batch_size=8, epochs=2, verbose=0)


def test_weights_that_are_given_as_such_are_taken_as_they_are():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model().fit(X, Y, sample_weight=torch.arange(16), batch_size=8, verbose=0)
