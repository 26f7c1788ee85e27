# SPDX-License-Identifier: Apache-2.0
"""Inputs that are transformed many at a time are those that are transformed singly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import ipufit
from ipufit import CachedDataset, DataError, IPUConfig, IPUModel, TransformedDataset


class Raw(Dataset):
    def __init__(self, count=12):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        return (torch.arange(6) + 3 * index).reshape(1, 2, 3).to(torch.uint8), index % 3


class Singly(Dataset):
    """The transform of one sample at a time."""

    def __init__(self, dataset, transform):
        self.dataset, self.transform = dataset, transform

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        x, *rest = self.dataset[index]
        return (self.transform(x[None])[0], *rest)


class Scale:
    """Counts the batches."""

    def __init__(self):
        self.sizes = []

    def __call__(self, x):
        self.sizes.append(len(x))
        return (x.to(torch.float32) / 255 - 0.1307) / 0.3081


def flipped(x):
    flip = torch.rand(()) < 0.5
    return Scale()(x.flip(-1) if flip else x)


def of_its_batch(x):
    return x.to(torch.float32) / x.max()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3))

    def forward(self, x):
        return self.layers(x)


def fitted(dataset, **config):
    torch.manual_seed(5)
    model = IPUModel(Model(), IPUConfig(seed=2, **config))
    model.compile("sgd", "cross_entropy")
    losses = model.fit(dataset, batch_size=4, epochs=2, verbose=0).history["loss"]
    return losses, model.predict(dataset, batch_size=4, verbose=0)


DATASETS = {
    "plain": Raw(),
    "cached": CachedDataset(Raw()),
    "subset": Subset(CachedDataset(Raw(14)), range(12)),
    "tensors": TensorDataset(*CachedDataset(Raw()).stacked),
}


@pytest.mark.parametrize("kind", DATASETS)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=8))
def test_samples_are_those_of_single_transforms(kind, indices):
    dataset = TransformedDataset(DATASETS[kind], Scale())
    singly = Singly(Raw(), Scale())
    for found, index in zip(dataset.__getitems__(indices), indices):
        for (x, y), (expected, label) in zip(
            (found, dataset[index]), (singly[index],) * 2
        ):
            assert torch.equal(x, expected)
            assert int(y) == label
    loader = DataLoader(Subset(dataset, indices), 3)
    for batch, other in zip(loader, DataLoader(Subset(singly, indices), 3)):
        assert all(map(torch.equal, batch, other))


@pytest.mark.parametrize("transform", [Scale(), flipped, of_its_batch])
@pytest.mark.parametrize("config", [{}, {"num_workers": 1}])
def test_a_fit_is_that_of_single_transforms(transform, config):
    dataset = TransformedDataset(CachedDataset(Raw()), transform)
    losses, outputs = fitted(dataset, **config)
    expected, others = fitted(Singly(Raw(), transform), **config)
    assert losses == expected
    if transform is not flipped:  # outputs of other random numbers
        assert torch.equal(outputs, others)


def test_batches_are_transformed_at_once():
    scale = Scale()
    dataset = TransformedDataset(CachedDataset(Raw()), scale)
    fitted(dataset, inference_iterations=1)
    assert scale.sizes.count(4) >= 3 * 2 + 2
    assert scale.sizes.count(1) <= 2 * (4 + 4)  # looking at one, and the first batch


def test_inputs_may_nest_and_have_no_target():
    rows = [{"a": torch.tensor([1.0, 2.0]), "b": 3}] * 4
    dataset = TransformedDataset(
        CachedDataset(rows), lambda x: {"sum": x["a"] + x["b"][:, None]}
    )
    assert dataset[0]["sum"].tolist() == [4.0, 5.0]
    assert len(dataset) == len(dataset.__getitems__([0, 1, 2, 3])) == 4


def test_a_transform_of_single_samples_is_refused():
    dataset = TransformedDataset(Raw(), lambda x: x[0])
    with pytest.raises(DataError, match=r"of 2 samples and returned \(1, 2, 3\)"):
        dataset.__getitems__([0, 1])
    dataset = TransformedDataset(Raw(), lambda x: len(x))
    with pytest.raises(DataError, match="of 2 samples and returned 2"):
        dataset.__getitems__([0, 1])


def test_streams_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(DataError, match="is a stream"):
        TransformedDataset(Stream(), Scale())
    with pytest.raises(DataError, match="is a int: pass a map-style dataset"):
        TransformedDataset(3, Scale())


def test_an_index_without_a_sample_is_an_index_error():
    with pytest.raises(IndexError):
        ipufit.TransformedDataset(Raw(), Scale())[12]
