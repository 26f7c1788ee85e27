# SPDX-License-Identifier: Apache-2.0
"""Batches that are stacked leaf by leaf are those of samples that are taken singly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ipufit import DataError
from ipufit.data.datasets import FlatDataset, Parts, collate
from ipufit.data.structure import SampleStructure
from tests.strategies import nestings

shapes = st.sampled_from([(), (2,), (1, 3)])
kinds = st.sampled_from(
    ["float32", "int64", "uint8", "float64", "bool", "array", "int", "float", "flag"]
)


def leaf_of(kind, shape, number):
    numbers = torch.arange(int(np.prod(shape))).reshape(shape) + number
    if kind == "array":
        return numbers.to(torch.float32).numpy()
    if kind in ("int", "float", "flag"):
        return {"int": int, "float": float, "flag": bool}[kind](number % 2)
    return numbers.to(getattr(torch, kind))


@st.composite
def samples(draw):
    """Samples of one to three parts, some of which nest."""
    leaves = draw(st.lists(st.tuples(kinds, shapes), min_size=1, max_size=3))
    is_nested = draw(st.booleans())

    def sample(number):
        parts = [leaf_of(*leaf, number) for leaf in leaves]
        return (
            ({"a": parts[0], "b": ["word", parts[0]]}, *parts[1:])
            if (is_nested)
            else tuple(parts)
        )

    return [sample(number) for number in range(draw(st.integers(1, 5)))]


def flat_of(items, parts_of=None):
    parts_of = parts_of or Parts()
    flat = FlatDataset(items, parts_of, SampleStructure.of(parts_of(items[0])), "x")
    flat[0]
    return flat


def assert_as_singly(flat, dataset=None):
    indices = list(range(len(flat)))
    expected = collate([flat[index] for index in indices])
    batch = collate((dataset or flat).__getitems__(indices))
    assert len(batch) == len(expected)
    for one, other in zip(batch, expected):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)


@given(samples())
def test_batches_are_those_of_single_samples(items):
    flat = flat_of(items)
    assert_as_singly(flat)
    assert_as_singly(flat, replace(flat, seed=5))


@given(nestings, st.integers(1, 3))
def test_any_nesting_is_stacked(inputs, count):
    if not SampleStructure.of((inputs,)).num_given:
        return
    assert_as_singly(flat_of([(inputs, 1)] * count))


def test_what_needs_care_is_stacked_too():
    frozen = np.ones(2, np.float32)
    frozen.setflags(write=False)
    for item in (
        (torch.ones(2, requires_grad=True), 1),
        (torch.ones(2, dtype=torch.float64), 1),
        (np.float32(2), 1),
        (frozen, 1),
        (float("inf"), 1),
    ):
        assert_as_singly(flat_of([item] * 2))


def test_strides_are_those_of_the_samples():
    image = torch.arange(24.0).reshape(2, 4, 3).permute(2, 0, 1)
    assert_as_singly(flat_of([(image, 1)] * 2))
    flat = flat_of([(image, 1)] * 4)
    loader = DataLoader(flat, 2, num_workers=1, collate_fn=collate)
    for batch, _ in loader:
        assert batch.is_contiguous()
        assert torch.equal(batch[1], image)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ((torch.zeros(3), 1), r"Sample 1 of `x` has shape \(3,\).*different shapes"),
        ((torch.zeros(2), 1.5), "Sample 1 of `x` is of torch.float32 and sample 0 of"),
        ((torch.zeros(2), True), "Sample 1 of `x` is of torch.bool and sample 0 of"),
        (((torch.zeros(2),) * 2, 1), "Sample 1 of `x` has a tuple"),
        ((torch.zeros(2), "one"), "Sample 1 of `x` has a str, 'one'"),
        ((torch.zeros(2), 1, 1, 1), "have 4 parts"),
        ((torch.zeros(2),), "nests differently from sample 0"),
        ((torch.zeros(2), 2**64), f"Sample 1 of `x` has {2**64}"),
    ],
)
def test_a_sample_unlike_the_first_is_refused_in_a_batch(odd, message):
    with pytest.raises(DataError, match=message):
        flat_of([(torch.zeros(2), 1), odd]).__getitems__([0, 1])


def test_a_constant_that_changes_is_named_in_a_batch():
    flat = flat_of([({"a": 1, "kind": "cat"}, 1), ({"a": 1, "kind": "dog"}, 1)])
    with pytest.raises(DataError, match=r"inputs\['kind'\] was 'cat' and is 'dog' now"):
        flat.__getitems__([0, 1])
