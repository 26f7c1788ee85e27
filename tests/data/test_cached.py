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
    get_worker_info,
)

from ipufit import (
    CachedDataset,
    DataError,
    IPUConfig,
    IPUModel,
    ModelCheckpoint,
)
from ipufit._tree import Structure, tree_map
from ipufit.data.datasets import ArrayDataset
from ipufit.data.random_state import random_state
from ipufit.data.sources import as_source
from tests import reference
from tests.checkpoint.samples import same_tensors
from tests.emulator._datasets import preload_fork_server
from tests.reference import Items
from tests.strategies import nestings

preload_fork_server()

# On a machine with one processor.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore::ipufit.errors.IpufitWarning"
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
    with pytest.raises(DataError, match="isn't the same"):
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
    model = IPUModel(reference.network(), IPUConfig(seed=3, **dict(config)))
    model.compile("sgd", "cross_entropy", weighted_metrics=["accuracy"])
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
        model = IPUModel(reference.network(), IPUConfig(seed=3))
        model.compile("adam", "cross_entropy", metrics=["accuracy"])
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


# Samples that are the same each time ---------------------------------------------


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


def ones(index):
    return torch.ones(4)


def of_torch(index):
    return torch.ones(4) + (torch.rand(()) > 0.5)


def of_numpy(index):
    return np.random.permutation(100)


def of_python(index):
    return random.random()


def rarely(index):
    """One sample in forty or so is another one."""
    return torch.full((2,), float(random.random() < 0.025))


def somewhere(index):
    """Like a transform of some classes only."""
    return torch.rand(3) if index == 37 else torch.zeros(3)


def a_random_shape(index):
    return torch.zeros(int(torch.randint(1, 9, ())))


class Drawing:
    """Has a generator of its own."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __call__(self, index):
        return self.generator.random(3)


class Filling:
    """Gives the same memory each time, with the index in it."""

    def __init__(self, memory):
        self.memory = memory

    def __call__(self, index):
        return self.memory.fill_(index)


class Reusing:
    """Gives the same memory each time."""

    def __init__(self):
        self.memory = torch.zeros(3)

    def __call__(self, index):
        return self.memory.copy_(torch.rand(3))


def of_the_worker(index):
    return 0 if get_worker_info() is None else 1


@pytest.mark.parametrize(
    "make",
    [
        of_torch,
        of_numpy,
        of_python,
        rarely,
        somewhere,
        a_random_shape,
        Drawing(),
        Reusing(),
    ],
)
@pytest.mark.parametrize("count", [COUNT, 1])
def test_what_is_not_the_same_each_time_is_refused(make, count):
    if make is somewhere and count == 1:
        assert len(CachedDataset(Computed(make, count))) == count
        return
    before = random_state()
    # Random shapes may be unlike the first sample's at once.
    fault = r"isn't the same .* without its random|different shapes"
    pattern = fault if "shape" in str(make) else fault.split("|")[0]
    with pytest.raises(DataError, match=pattern):
        CachedDataset(Computed(make, count))
    assert same_tensors(random_state(), before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (somewhere, r"Sample 37 .*: sample\[0\]\['a'\] differs in 3 of 3 numbers"),
        (of_python, r"Sample 0 .*: sample\[0\]\['a'\] is 0\.\d+ once and 0\.\d+ the"),
        (a_random_shape, r"Sample \d+ of `dataset` has shape"),
    ],
)
def test_the_message_says_which_sample_and_which_leaf(make, message):
    with pytest.raises(DataError, match=message):
        CachedDataset(Computed(make))


@pytest.mark.parametrize("make", [rarely, of_the_worker])
def test_processes_do_not_hide_it(make):
    before = random_state()
    with pytest.raises(DataError, match="isn't the same when it is computed again"):
        CachedDataset(Computed(make), num_workers=2)
    assert same_tensors(random_state(), before)


def drawing_for_nothing(index):
    return random.random() * 0 + np.random.rand() * 0 + torch.rand(2) * 0 + index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_drawing_numbers_that_change_nothing_is_no_fault(num_workers):
    before = random_state()
    cached = CachedDataset(Computed(drawing_for_nothing), num_workers)
    assert same_tensors(random_state(), before)
    assert cached.stacked[0]["a"][:, 0].tolist() == list(range(COUNT))


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
    for num_workers in (0, 2) if make is another_shape_at_50 else (0,):
        with pytest.raises(DataError, match=message):
            CachedDataset(Computed(make), num_workers)


def test_what_does_not_fit_into_memory_is_refused():
    with pytest.raises(DataError, match=r"^1000000000000000 samples .* 24 bytes each"):
        CachedDataset(Computed(ones, 10**15))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_may_use_its_memory_again(num_workers):
    memory = torch.zeros(3)
    cached = CachedDataset(Computed(Filling(memory)), num_workers)
    assert cached.stacked[0]["a"][:, 1].tolist() == list(range(COUNT))
