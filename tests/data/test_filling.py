# SPDX-License-Identifier: Apache-2.0
"""Samples are computed once, if they are the same each time."""

from __future__ import annotations

import random
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from ipufit import CachedDataset, DataError
from ipufit.data.random_state import random_state
from tests.checkpoint.samples import same_tensors
from tests.emulator._datasets import preload_fork_server

preload_fork_server()

# On a machine with one processor.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

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


def a_random_structure(index):
    return [1] * random.randint(1, 9)


class Counting:
    """Depends on what was computed before."""

    def __init__(self):
        self.calls = 0

    def __call__(self, index):
        self.calls += 1
        return self.calls


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
        a_random_structure,
        Counting(),
        Drawing(),
        Reusing(),
    ],
)
@pytest.mark.parametrize("count", [COUNT, 38, 1])
def test_what_is_not_the_same_each_time_is_refused(make, count):
    if make is somewhere and count < 38:
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


@pytest.mark.parametrize("make", [of_python, rarely, of_the_worker])
def test_processes_do_not_hide_it(make):
    before = random_state()
    with pytest.raises(DataError, match="isn't the same when it is computed again"):
        CachedDataset(Computed(make), num_workers=2)
    assert same_tensors(random_state(), before)


def drawing_for_nothing(index):
    return random.random() * 0 + np.random.rand() * 0 + torch.rand(2) * 0 + index


class Asked:
    def __init__(self, make):
        self.make, self.indices = make, []

    def __call__(self, index):
        self.indices.append(index)
        return self.make(index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_drawing_numbers_that_change_nothing_is_no_fault(num_workers):
    before = random_state()
    cached = CachedDataset(Computed(drawing_for_nothing), num_workers)
    assert same_tensors(random_state(), before)
    assert cached.stacked[0]["a"][:, 0].tolist() == list(range(COUNT))


@pytest.mark.parametrize("count", [1, 2, 16, 17, COUNT])
def test_samples_all_over_the_dataset_are_computed_twice_at_once(count):
    asked = Asked(ones)
    CachedDataset(Computed(asked, count))
    early = asked.indices[1:-count]  # after the first sample, which the rest is held to
    twice = early[::2]
    assert twice == early[1::2]
    assert len(set(twice)) == len(twice) == min(count, 16)
    assert {0, count - 1} <= set(twice)
    assert all(b - a <= count / 15 + 1 for a, b in zip(twice, twice[1:]))


def test_a_fault_is_found_before_the_rest_is_computed():
    asked = Asked(of_python)
    with pytest.raises(DataError):
        CachedDataset(Computed(asked, 10**9))
    assert len(asked.indices) < 10


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda i: torch.zeros(2 + (i == 50)), r"50 .* shape \(3,\) and sample 0 has"),
        (lambda i: 1 if i != 50 else 1.5, "50 .*float32 and sample 0 of torch.int"),
        (lambda i: [i] * (1 + (i == 50)), "50 .* nests differently .* expected 1"),
        (lambda i: [i, "cat" if i == 50 else "dog"], "50 .*'dog' and is 'cat' now"),
        (lambda i: 1 if i != 50 else {1}, r"Sample 50 of `dataset` has a set"),
    ],
)
def test_samples_that_cannot_be_stacked_are_named(make, message, num_workers):
    # A lambda isn't sent to processes that don't fork.
    if num_workers and torch.multiprocessing.get_start_method() != "fork":
        pytest.skip("processes don't fork here")
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


def test_an_error_of_the_dataset_is_its_own():
    def make(index):
        if index == 50:
            raise KeyError("a lost file")
        return 1

    before = random_state()
    with pytest.raises(KeyError, match="a lost file"):
        CachedDataset(Computed(make))
    assert same_tensors(random_state(), before)
