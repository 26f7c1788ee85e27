# SPDX-License-Identifier: Apache-2.0
"""Random samples made on the host."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ipufit
from ipufit import CachedDataset, ConfigError, IPUConfig, IPUModel, generated
from ipufit._tree import Structure, tree_map
from tests.emulator._datasets import preload_fork_server
from tests.strategies import examples

preload_fork_server()

SPEC = (((3, 4), "float32"), ((), torch.int64, 10))


def same(one, other):
    structure = Structure.of(one)
    pairs = list(zip(structure.flatten(one), structure.flatten(other)))
    assert pairs
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_a_sample_depends_on_seed_and_index_only():
    data = generated(SPEC, 20)
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    assert same(data[7], generated(SPEC, 900)[7])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert same(data[-1], data[19])
    assert same(data[7], pickle.loads(pickle.dumps(data))[7])
    assert not same(data[7], data[8])
    assert not same(data[7], generated(SPEC, 20, seed=1)[7])
    with pytest.raises(IndexError, match="There is no sample 20: there are 20"):
        data[20]


def test_iterating_ends():
    assert len(list(generated(SPEC, 5))) == len(generated(SPEC, 5)) == 5


def test_the_order_and_the_process_of_loading_change_nothing():
    data = generated(SPEC, 6)
    loaded = list(DataLoader(data, batch_size=3, num_workers=1))
    assert len(loaded) == 2
    x, y = (torch.cat(parts) for parts in zip(*loaded))
    assert all(same((x[i], y[i]), data[i]) for i in range(6))


@pytest.mark.parametrize(
    ("leaf", "dtype", "least", "most"),
    [
        (((2000,), "int64", 3), torch.int64, 0, 2),
        (((2000,), np.int32, (-2, 2)), torch.int32, -2, 1),
        (((2000,), torch.uint8), torch.uint8, 0, 255),
        ((2000, bool), torch.bool, 0, 1),
        (torch.zeros(2000, dtype=torch.bool), torch.bool, 0, 1),
        (torch.full((2000,), 4), torch.int64, 0, 4),
        (np.arange(-1, 1999) // 1000, torch.int64, -1, 1),
    ],
)
def test_whole_numbers_fill_their_range(leaf, dtype, least, most):
    drawn = generated(leaf, 1)[0]
    assert drawn.dtype == dtype
    assert (int(drawn.min()), int(drawn.max())) == (least, most)


def test_floats_are_normal_or_uniform():
    normal, uniform, half, wide = generated(
        {
            "normal": torch.empty(5000),
            "uniform": (5000, "float32", (2, 4)),
            "half": ((5000,), "torch.float16"),
            "wide": np.zeros(2),
        },
        1,
    )[0].values()
    assert abs(normal.mean()) < 0.1
    assert abs(normal.std() - 1) < 0.1
    assert 2 <= uniform.min() < 2.1
    assert 3.9 < uniform.max() <= 4
    assert half.dtype == torch.float16
    assert wide.dtype == torch.float32  # as fit takes it


def test_numbers_become_tensors_and_constants_stay():
    sample = generated((0.5, {"n": 7, "none": None, "tag": "a"}), 50)
    numbers = [sample[i][1]["n"] for i in range(50)]
    assert {int(n) for n in numbers} == set(range(8))
    x, rest = sample[0]
    assert x.shape == ()
    assert (rest["none"], rest["tag"]) == (None, "a")


@given(
    st.recursive(
        st.builds(torch.zeros, st.lists(st.integers(1, 3), max_size=2)),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
        ),
        max_leaves=6,
    )
)
@settings(max_examples=examples(60))
def test_samples_nest_as_the_example(example):
    drawn = generated(example, 3)[2]
    shapes = tree_map(lambda leaf: tuple(leaf.shape), example)
    assert tree_map(lambda leaf: tuple(leaf.shape), drawn) == shapes


def test_a_dataset_shows_what_its_samples_look_like():
    mine = TensorDataset(torch.zeros(9, 4), torch.full((9,), 5))
    x, y = generated(mine, 100)[99]
    assert x.shape == (4,)
    assert 0 <= y <= 5
    with pytest.raises(ConfigError, match="dataset without samples"):
        generated(TensorDataset(torch.zeros(0, 4)), 3)


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(2)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            ((3,), "int64"),
            r"no range, .* Say how many there are: \(\(3,\), 'int64', 10",
        ),
        ((torch.zeros(2), ((), "int32")), r"spec\[1\]=\(\(\), 'int32'\) has whole"),
        (torch.empty(2, dtype=torch.int64, device="meta"), "no range"),
        (((3,), "complex64"), "complex64.*real numbers"),
        (((3,), object), "object.*real numbers"),
        (((3,), "int64", 0), "the range 0: give an upper bound"),
        (((3,), "int64", (4, 4)), r"the range \(4, 4\)"),
        (((3,), "int64", 2.5), "of whole numbers"),
        (((3,), "int8", 1000), "holds -128 to 127"),
        (((3,), "int64", 2**33), "holds -2147483648 to 2147483647"),
        (((3, 0), "float32"), r"the shape \(3, 0\)"),
        ({"a": {"b": object()}}, r"spec\['a'\]\['b'\] is a object"),
        ((), "has no tensors"),
        ("image", "'image' has no tensors"),
        (Stream(), "is a .*Stream: give an example"),
    ],
)
def test_what_tells_no_samples_is_refused(spec, says):
    with pytest.raises(ConfigError, match=says):
        generated(spec, 2)


@pytest.mark.parametrize("n", [0, -1, 2.0, True])
def test_a_number_of_samples_that_is_none_is_refused(n):
    with pytest.raises(ConfigError, match=r"n=.* is not a whole number of 1 or more"):
        generated(SPEC, n)
    with pytest.raises(ConfigError, match=r"seed=.* is not a whole number"):
        generated(SPEC, 2, seed=0.5)


def test_fit_evaluate_and_predict_take_it():
    spec = (torch.zeros(4), ((), "int64", 3))
    data = generated(spec, 24)
    cached = CachedDataset(data)
    losses = []
    for x in (data, cached):
        torch.manual_seed(0)
        model = IPUModel(torch.nn.Linear(4, 3), IPUConfig(replicas=2, seed=1))
        model.compile("sgd", "cross_entropy", metrics=["accuracy"])
        history = model.fit(x, batch_size=8, epochs=2, verbose=0)
        losses.append(history.history["loss"])
        losses[-1].append(model.evaluate(x, batch_size=8, verbose=0)["loss"])
        assert model.predict(x, verbose=0).shape == (24, 3)
    assert losses[0] == losses[1]


def test_it_says_what_it_gives():
    assert repr(ipufit.generated(SPEC, 5)) == (
        "<5 generated samples of [3, 4] torch.float32, [] torch.int64>"
    )
