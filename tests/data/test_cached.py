# SPDX-License-Identifier: Apache-2.0
"""A cached dataset is the dataset, computed once."""

from __future__ import annotations

import random
from typing import Any, Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
)

from ipufit import (
    CachedDataset,
    DataError,
    ModelCheckpoint,
)
from ipufit._tree import Structure, tree_map
from ipufit.data.arrays import ArrayDataset
from ipufit.data.random_state import random_state
from ipufit.data.sources import as_source
from ipufit.errors import IpufitWarning
from tests import reference
from tests.files.samples import same_tensors
from tests.reference import Items
from tests.strategies import nestings

# On a machine with one processor.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore::ipufit.errors.DroppedRowsWarning"
)


def pairs(count, seed=0):
    return Items(list(zip(*reference.samples(count, seed))))


# The samples -------------------------------------------------------------------


@given(nestings.filter(lambda n: Structure.of(n).num_leaves), st.integers(1, 40))
def test_any_nesting_comes_back(nesting, count):
    items = [tree_map(lambda leaf, i=i: leaf + i, nesting) for i in range(count)]
    cached = CachedDataset(Items(items))
    assert len(cached) == count
    assert [tree_map(int, sample) for sample in cached] == items
    indices = [count - 1, 0, -1, 0]
    together = cached.__getitems__(indices)
    assert [tree_map(int, one) for one in together] == [items[i] for i in indices]
    assert Structure.of(cached[0]) == Structure.of(items[0])
    assert all(len(leaf) == count for leaf in cached._tensors)


NUMBERS = {
    "bool": (True, torch.bool),
    "float64 of NumPy": (np.float64(0.1), torch.float64),
    "float64": (torch.ones(2, dtype=torch.float64) / 3, torch.float64),
    "reversed": (np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::-1], torch.int32),
    "empty": (torch.zeros(0, 2), torch.float32),
    "some aren't numbers": (torch.tensor([1.0, float("nan")]), torch.float32),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_types_and_values_are_kept(name):
    value, dtype = NUMBERS[name]
    cached = CachedDataset([value] * 5)
    for leaf in (cached[3], cached.stacked[3], cached.__getitems__([3])[0]):
        assert leaf.dtype == dtype
        np.testing.assert_array_equal(leaf, value)


def test_indices_are_those_of_a_sequence():
    cached = CachedDataset(pairs(5))
    for index in (-5, -1, np.int64(4), torch.tensor(4), True):
        assert torch.equal(cached[index][0], cached[int(index) % 5][0])
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"no sample {index}: there are 5"):
            cached[index]
        with pytest.raises(IndexError):
            cached.__getitems__([index])
    with pytest.raises(TypeError):
        cached[0.5]
    assert cached.__getitems__([]) == []


def test_samples_are_copies():
    cached = CachedDataset(pairs(5))
    before = [leaf.clone() for leaf in cached.stacked]
    for sample in (cached[2], *cached.__getitems__([1, 2])):
        for leaf in sample:
            leaf.zero_().sub_(1)
    assert all(map(torch.equal, cached.stacked, before))


def test_the_dataset_itself_is_not_kept():
    samples = [pairs(5)[index] for index in range(5)]
    items = Items(samples)
    cached = CachedDataset(items)
    expected = [leaf.clone() for leaf in cached.stacked]
    for x, _ in samples:
        x.zero_()
    assert all(map(torch.equal, cached.stacked, expected))
    assert items not in vars(cached).values()


def test_processes_fill_it_alike():
    items = pairs(100)
    before = random_state()
    cached = CachedDataset(items, num_workers=2)
    assert same_tensors(random_state(), before)
    for one, other in zip(cached.stacked, CachedDataset(items).stacked):
        assert torch.equal(one, other)


class TableRows(Items):
    """Stands for a Hugging Face dataset: lists of numbers are arrays."""

    column_names = features = ("a", "b")


def test_rows_of_a_table_have_arrays():
    items = [{"a": [i, i + 1, i + 2], "b": i % 2} for i in range(6)]
    assert CachedDataset(TableRows(items)).stacked["a"].shape == (6, 3)
    cached, plain = CachedDataset(TableRows(items)), TableRows(items)
    for one, other in zip(
        as_source(cached, "b").dataset, as_source(plain, "b").dataset
    ):
        assert all(map(torch.equal, one, other))


# What is taken -----------------------------------------------------------------


def test_what_is_in_memory_is_taken_as_it_is():
    tensors = reference.samples(6)
    cached = CachedDataset(TensorDataset(*tensors))
    again = CachedDataset(cached, num_workers=2)
    for one, other, own in zip(cached.stacked, again.stacked, tensors):
        assert one.data_ptr() == other.data_ptr() == own.data_ptr()
    assert torch.equal(again[4][0], tensors[0][4])


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * leaf for leaf in super().__getitem__(index))


class Noisy(CachedDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.rand(()), y


def test_a_subclass_may_do_more():
    x, y = reference.samples(6)
    assert torch.equal(CachedDataset(Doubled(x, y)).stacked[0], 2 * x)
    noisy = Noisy(pairs(6))
    assert not isinstance(as_source(noisy).dataset, ArrayDataset)
    with pytest.warns(IpufitWarning, match="draw random numbers"):
        CachedDataset(noisy)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1, 2])

    def __len__(self):
        return 2


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Stream(), r"is a stream \(Stream\).* list\(dataset\) is one"),
        (DataLoader([1, 2]), "is a DataLoader: .* of a loader its `dataset`"),
        (iter([1]), "map-style dataset of samples"),
        ({0: 1}, "is a dict"),
        (Items([]), "`dataset` has no samples"),
        (Items(["text"]), "Sample 0 of `dataset` holds no numbers: 'text'"),
        (Items([{1, 2}]), "Sample 0 of `dataset` has a set"),
        (Items([torch.zeros(2, dtype=torch.cfloat)]), "Sample 0 .* real numbers"),
    ],
)
def test_what_cannot_be_cached_is_refused(dataset, message):
    with pytest.raises(DataError, match=message):
        CachedDataset(dataset)
    if isinstance(dataset, Stream):
        assert CachedDataset(list(dataset)).stacked.tolist() == [1, 2]


# In fit, evaluate and predict --------------------------------------------------


def fitted(x, config=(), **arguments):
    model = reference.compiled(seed=3, **dict(config), weighted_metrics=["accuracy"])
    history = model.fit(x, batch_size=4, epochs=2, verbose=0, **arguments)
    return history.history, reference.weights(model.module)


def test_the_last_samples_may_validate():
    x, y = reference.samples(13)
    cached = CachedDataset(pairs(13))
    one, other = (
        fitted(cached, validation_split=0.3),
        fitted(x, y=y, validation_split=0.3),
    )
    assert "val_loss" in one[0]
    assert one[0] == other[0]
    assert same_tensors(one[1], other[1])
    with pytest.raises(DataError, match=r"or hold it in memory as ipufit\.CachedDat"):
        fitted(pairs(13), validation_split=0.3)


def test_a_run_goes_on_with_the_cache_of_its_dataset(tmp_path):
    def run_on(x, epochs, name, **resume):
        model = reference.compiled(seed=3, optimizer="adam", metrics=["accuracy"])
        folder = tmp_path / name
        folder.mkdir()
        saving = ModelCheckpoint(folder / "{epoch}", save_weights_only=False)
        history = model.fit(
            x, batch_size=4, epochs=epochs, verbose=0, callbacks=[saving], **resume
        )
        return history.history, reference.weights(model.module)

    run_on(pairs(13), 1, "begun")
    (saved,) = (tmp_path / "begun").iterdir()
    one = run_on(CachedDataset(pairs(13)), 3, "resumed", resume=saved)
    other = run_on(pairs(13), 3, "unbroken")
    assert one[0] == other[0]
    assert len(one[0]["loss"]) == 3
    assert same_tensors(one[1], other[1])


# How it is filled --------------------------------------------------------------


COUNT = 70


class Computed(Dataset):
    """Samples `({"a": sample}, index)`, which a function of the index makes."""

    def __init__(self, make: Callable[[int], Any], count: int = COUNT) -> None:
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        assert 0 <= index < self.count
        return {"a": self.make(index)}, index


def random_numbers(index):
    return {
        "torch": torch.rand(2),
        "numpy": np.random.rand(2),
        "python": random.random(),
    }


def test_random_transforms_are_frozen_with_a_warning():
    before = random_state()
    with pytest.warns(IpufitWarning, match="freezes them for every epoch"):
        cached = CachedDataset(Computed(random_numbers))
    assert same_tensors(random_state(), before)
    values = cached.stacked[0]["a"]
    for leaf in values.values():
        assert len(leaf.unique()) > COUNT / 2
    again = cached[3][0]["a"]
    assert torch.equal(values["torch"][3], again["torch"])


def another_shape_at_50(index):
    return torch.zeros(2 + (index == 50))


OTHER_SHAPE = r"50 .* shape \(3,\) and sample 0 has"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (another_shape_at_50, OTHER_SHAPE),
        (lambda i: [i] * (1 + (i == 50)), "50 .* nests differently .* expected 1"),
        (lambda i: [i, "cat" if i == 50 else "dog"], "50 .*'dog' and is 'cat' now"),
        (lambda i: 1 if i != 50 else {1}, r"Sample 50 of `dataset` has a set"),
    ],
)
def test_samples_that_cannot_be_stacked_are_named(make, message):
    with pytest.raises(DataError, match=message):
        CachedDataset(Computed(make))
