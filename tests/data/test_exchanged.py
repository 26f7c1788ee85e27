# SPDX-License-Identifier: Apache-2.0
"""A dataset whose samples are exchanged during a run, as for a curriculum."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import ipufit
from ipufit import DataError
from tests.reference import assert_same_weights, compiled

X, Y = torch.rand(24, 3), torch.arange(24) % 3


class Growing(Dataset):
    def __init__(self):
        self.count = 8

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return X[index], Y[index]


def grow(dataset):
    dataset.count += 8


def replace_tensors(dataset):
    dataset.tensors = (X[8:16], Y[8:16])


def replace_indices(dataset):
    dataset.indices = list(range(8, 16))


def write_indices(dataset):
    dataset.indices[:] = range(8, 16)


CASES = [
    (Growing, grow, "8 samples when the run began, and 16 now"),
    (lambda: TensorDataset(X[:8], Y[:8]), replace_tensors, "other tensors"),
    (lambda: Subset(TensorDataset(X, Y), list(range(8))), replace_indices, "indices"),
    (lambda: Subset(TensorDataset(X, Y), list(range(8))), write_indices, "indices"),
]


def model():
    torch.manual_seed(0)
    return compiled(torch.nn.Linear(3, 3))


def at_second_epoch(change, dataset):
    def begin(epoch, logs):
        if epoch == 1:
            change(dataset)

    return ipufit.LambdaCallback(on_epoch_begin=begin)


@pytest.mark.parametrize(("make", "change", "words"), CASES)
def test_samples_that_are_exchanged_during_a_run_are_said(make, change, words):
    dataset = make()
    arguments = {"epochs": 2, "batch_size": 4, "verbose": 0}
    with pytest.raises(DataError, match=f"`x` had .*{words}.*Pass a DataLoader"):
        model().fit(dataset, **arguments, callbacks=at_second_epoch(change, dataset))
    dataset = make()
    with pytest.raises(DataError, match=f"`validation_data` had .*{words}"):
        model().fit(
            *(X, Y),
            **arguments,
            validation_data=dataset,
            callbacks=at_second_epoch(change, dataset),
        )
    model().fit(dataset, **arguments)  # the next run begins with what there is now


@pytest.mark.parametrize(("make", "change", "_words"), CASES)
def test_a_loader_goes_on_with_what_there_is(make, change, _words):
    dataset, other = make(), model()
    fitted = model()
    fitted.fit(
        DataLoader(dataset, batch_size=4),
        epochs=2,
        verbose=0,
        callbacks=at_second_epoch(change, dataset),
    )
    other.fit(DataLoader(make(), batch_size=4), verbose=0)
    changed = make()
    change(changed)
    other.fit(changed, batch_size=4, shuffle=False, verbose=0)
    assert_same_weights(fitted.module, other.module)


def double(dataset):
    x, y = dataset.tensors
    dataset.tensors = x.mul_(2), y


def test_values_that_are_written_into_the_tensors_are_trained_on():
    dataset, fitted, other = TensorDataset(X[:8].clone(), Y[:8]), model(), model()
    change = at_second_epoch(double, dataset)
    arguments = {"batch_size": 4, "shuffle": False, "verbose": 0}
    fitted.fit(dataset, epochs=2, callbacks=change, **arguments)
    other.fit(X[:8], Y[:8], **arguments)
    other.fit(2 * X[:8], Y[:8], **arguments)
    assert_same_weights(fitted.module, other.module)
