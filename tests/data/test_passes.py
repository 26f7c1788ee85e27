# SPDX-License-Identifier: Apache-2.0
"""Passes over streams that can be repeated up to a place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from ipufit.data.streams import Pass, generators_of


def block_of(batch):
    return [batch]


def noise(count):
    for _ in range(count):
        yield torch.rand(2)


class Noise:
    def __iter__(self):
        return noise(6)


def numbers(pass_, count):
    return [next(pass_)[0].tolist() for _ in range(count)]


@given(st.integers(1, 6), st.booleans())
def test_the_last_block_and_what_follows_come_again(count, is_disturbed):
    original = Pass(Noise(), block_of)
    seen = []
    for _ in range(count):
        seen += numbers(original, 1)
        if is_disturbed:
            torch.rand(3)  # somebody else draws between two blocks
    replay = original.replay()
    assert replay.num_blocks == count
    torch.rand(5)
    again = numbers(Pass(Noise(), block_of, replay=replay), count)
    assert again[-1] == seen[-1]
    assert is_disturbed or again == seen


def test_a_block_that_was_drawn_is_given_out_first():
    one = Pass([1, 2, 3], block_of)
    one.first = block_of(one.draw())
    assert list(one) == [[1], [2], [3]]
    assert one.replay().num_blocks == 3


def test_the_order_of_a_loader_with_its_own_generator_comes_again():
    def loader(seed):
        own = torch.Generator().manual_seed(seed)
        return DataLoader(torch.arange(20), 4, shuffle=True, generator=own)

    first = loader(1)
    list(first)  # a pass of another order
    original = Pass(first, block_of, generators_of(first))
    expected = numbers(original, 3)
    other = loader(2)
    again = Pass(other, block_of, generators_of(other), original.replay())
    assert numbers(again, 3) == expected
    assert numbers(again, 2) == numbers(original, 2)


@pytest.mark.parametrize("owner", ["loader", "sampler", "batch_sampler"])
def test_every_generator_of_a_loader_is_found_once(owner):
    own = torch.Generator()
    sampler = RandomSampler(range(4), generator=own)
    settings = {
        "loader": {"generator": own, "shuffle": True},
        "sampler": {"sampler": sampler},
        "batch_sampler": {"batch_sampler": BatchSampler(sampler, 2, False)},
    }
    assert generators_of(DataLoader(range(4), **settings[owner])) == [own]


def test_other_iterables_have_none():
    assert generators_of([1, 2]) == []
    assert generators_of(DataLoader(range(4), batch_size=None)) == []
