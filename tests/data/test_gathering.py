# SPDX-License-Identifier: Apache-2.0
"""Samples in memory, gathered as a loader would give them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ipufit.data.calls import GatheredCalls
from ipufit.data.datasets import ArrayDataset
from ipufit.data.order import InOrder, Order, Position


@given(
    st.integers(1, 30),
    st.integers(1, 7),
    st.none() | st.integers(0, 9),
    st.integers(0, 3),
    st.integers(0, 5),
)
def test_calls_are_those_of_a_loader(count, rows, seed, skipped, more):
    tensors = [torch.arange(count), torch.arange(2.0 * count).reshape(count, 2)]

    def order():
        place = Position(1, min(skipped, count // rows))
        return Order(count, count + more, seed, place, rows)

    loader = DataLoader(
        ArrayDataset(tensors),
        rows,
        sampler=order(),
        drop_last=True,
        collate_fn=list,
    )
    gathered = GatheredCalls(ArrayDataset(tensors), order(), rows)
    for _ in range(2):  # passes
        expected, calls = list(loader), list(gathered)
        assert len(calls) == len(expected)
        for call, other in zip(calls, expected):
            assert all(map(torch.equal, call, other))


@given(st.integers(1, 20), st.integers(1, 7), st.lists(st.integers(0, 19), max_size=9))
def test_the_order_of_an_evaluation_fills_whole_calls(count, rows, further):
    further = [index % count for index in further]
    order = InOrder(count, rows, further)
    assert list(order) == order.indices().tolist()
    assert len(order) == len(order.indices())
    assert len(order) % rows == 0
    assert list(order)[:count] == list(range(count))


def test_calls_are_copies():
    tensor = torch.zeros(4)
    for call in GatheredCalls(ArrayDataset([tensor]), Order(4, 4), 2):
        call[0].fill_(1)
    assert tensor.tolist() == [0, 0, 0, 0]
