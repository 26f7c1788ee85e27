# SPDX-License-Identifier: Apache-2.0
"""What depends on nothing that changes."""

from __future__ import annotations

import pytest
import torch
from torch.fx.graph import Graph

from ipufit.emulator._tracing.nodes import (
    constant_nodes,
    function_name,
    is_in_place,
)


def test_constants_are_what_only_constants_lead_to():
    graph = Graph()
    weight, table = graph.placeholder("weight_0"), graph.placeholder("weight_1")
    ones = graph.call_function(torch.ones, (2,))
    scaled = graph.call_function(torch.mul, (ones, table))
    mixed = graph.call_method("add", (scaled, weight))
    attribute = graph.get_attr("constant_0")
    graph.output((mixed, attribute))
    assert constant_nodes(graph, {"weight_1"}) == {table, ones, scaled, attribute}


@pytest.mark.parametrize("draw", [torch.rand, torch.randn, torch.randperm])
def test_random_numbers_are_not_constant(draw):
    graph = Graph()
    random = graph.call_function(draw, (2,))
    graph.call_method("add", (random, 1))
    assert constant_nodes(graph, ()) == set()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("add_", True),
        ("__setitem__", True),
        ("__iand__", True),
        ("add", False),
        ("__getitem__", False),
        ("__rsub__", False),
    ],
)
def test_in_place_calls_are_told_by_their_names(name, expected):
    graph = Graph()
    node = graph.call_method(name, (graph.placeholder("x"), 0))
    assert function_name(node) == name
    assert is_in_place(node) is expected
