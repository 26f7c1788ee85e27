# SPDX-License-Identifier: Apache-2.0
"""Gradients of tables by rows, beside those that torch adds up in whole tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule
from torch.nn.functional import embedding

from ipufit.emulator._device.row_gradients import Table, with_tables


def bits(tensor):
    return None if tensor is None else tensor.contiguous().view(torch.int32)


@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 40),
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    has_padding=st.booleans(),
    index_type=st.sampled_from([torch.int32, torch.int64]),
)
def test_it_gives_the_bits_that_torch_adds_up(
    seed, rows, counts, has_padding, index_type
):
    generator = torch.Generator().manual_seed(seed)
    padding = seed % rows if has_padding else None
    weight = torch.randn(rows, 3, generator=generator).requires_grad_()
    twin = weight.detach().clone().requires_grad_()
    table = Table(padding)
    for count in counts:
        indices = torch.randint(rows, (2, count), generator=generator).to(index_type)
        # Rounding shows the order of sums; zeros of either sign show what is added.
        factors = torch.randn(2, count, 3, generator=generator) ** 3
        factors *= torch.randint(-1, 2, (2, count, 1), generator=generator)
        (embedding(indices, twin, padding_idx=padding) * factors).sum().backward()
        result = table.look_up(indices, weight)
        assert torch.equal(result, embedding(indices, twin))
        (result * factors).sum().backward()
    assert weight.grad is None
    assert torch.equal(bits(table.take(weight)), bits(twin.grad))
    assert table.take(weight) is None


def program(**options):
    """A function that looks 2 tables up, one of them twice."""
    graph = Graph()
    first, second, x = (graph.placeholder(name) for name in ("first", "second", "x"))
    sums = graph.call_function(embedding, (x, first), options)
    for _ in range(2):
        found = graph.call_function(embedding, (x, second))
        sums = graph.call_function(torch.add, (sums, found))
    graph.output(sums)
    return GraphModule(nn.Module(), graph).forward


X = torch.tensor([[0, 3], [3, 1]])
WEIGHTS = torch.arange(24.0).view(2, 6, 2).unbind()


def test_only_tables_that_are_read_once_keep_rows():
    function = program(padding_idx=-1, max_norm=None)
    copy, tables = with_tables(function, [True, True])
    assert list(tables) == [0]
    assert torch.equal(copy(*WEIGHTS, X), function(*WEIGHTS, X))
    calls = [node.target for node in copy.__self__.graph.nodes]
    assert calls.count(embedding) == 2
    assert embedding in [node.target for node in function.__self__.graph.nodes]


@pytest.mark.parametrize(
    "options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]
)
def test_other_kinds_of_embeddings_stay(options):
    function = program(**options)
    assert with_tables(function, [True, True]) == (function, {})


def test_small_tables_stay():
    function = program()
    assert with_tables(function, [False, True]) == (function, {})
