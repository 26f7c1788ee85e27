# SPDX-License-Identifier: Apache-2.0
"""Marked copies of programs compute the same, and tell whose operations run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.graph import Graph
from torch.fx.graph_module import GraphModule

from ipufit.emulator._device.segments import Marks


def program(scopes):
    """A chain of operations, each in one of these scopes; None: it has none."""
    graph = Graph()
    value = graph.placeholder("x")
    for index, scope in enumerate(scopes):
        function = torch.sin if index % 2 else torch.exp
        value = graph.call_function(function, (value,))
        if scope is not None:
            value.meta["operator"] = (scope, "op")
    graph.output((value,))
    return GraphModule(torch.nn.Module(), graph).forward


def runs(names):
    return [n for i, n in enumerate(names) if i == 0 or names[i - 1] != n]


def heard(scopes):
    forward, backward, ends = [], [], []
    into = forward
    marks = Marks(lambda name: into.append(name), lambda: ends.append(len(forward)))
    function = program(scopes)
    x = torch.linspace(-1, 1, 5, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    (result,) = marks.marked(function)(x)
    (expected,) = function(twin)
    assert torch.equal(result, expected)
    assert ends == [len(forward)]
    into = backward
    result.sum().backward()
    expected.sum().backward()
    assert torch.equal(x.grad, twin.grad)
    assert backward == forward[::-1]
    return forward


@given(st.lists(st.sampled_from(["a/x/", "b/y/", "a/z/", ""]), min_size=1, max_size=9))
def test_segments_come_in_order_and_backward_in_the_opposite_one(scopes):
    found = heard(scopes)
    assert found == runs(found)
    of_roots = runs([name.split("/")[0] for name in found])
    assert of_roots == runs([scope.split("/")[0] for scope in scopes])


@pytest.mark.parametrize(
    ("scopes", "names"),
    [
        (["net/a/", "net/b/", ""], ["net/a", "net/b", ""]),
        (["net/", "0/"], ["net", "0"]),
        (["net/stem/", "net/body/0/x/", "net/body/1/y/", "net/"], None),
        (["net/a/x/", "net/b/y/", "net/a/z/"], ["net/a", "net/b", "net/a"]),
        ([None, "a/x/", None, "a/y/", None], ["a/x", "a/y"]),
        ([None, None], [""]),
    ],
)
def test_scopes_are_cut_off_where_modules_part(scopes, names):
    expected = names or ["net/stem", "net/body/0", "net/body/1", "net"]
    assert heard(scopes) == expected


def test_copies_are_kept_until_they_are_forgotten():
    marks, function = Marks(lambda name: None, lambda: None), program(["a/"])
    assert not marks.has(function)
    copy = marks.marked(function)
    assert marks.has(function)
    assert marks.marked(function) == copy
    marks.forget()
    assert not marks.has(function)


def test_results_that_another_one_takes_tell_of_their_module_too():
    graph = Graph()
    x = graph.placeholder("x")
    values = [
        graph.call_function(torch.neg, (x,)),
        graph.call_function(torch.split, (x, 1)),
    ]
    for value, scope in zip(values, ("a/", "b/")):
        value.meta["operator"] = (scope, "op")
    item = graph.call_function(lambda pair: pair[0], (values[1],))
    item.meta["operator"] = ("c/", "op")
    graph.output((item, values[0]))
    names = []
    marks = Marks(names.append, lambda: names.append("end"))
    function = marks.marked(GraphModule(torch.nn.Module(), graph).forward)
    one, other = function(torch.ones(2, requires_grad=True))
    assert names == ["a", "b", "c", "end"]
    (one.sum() + other.sum()).backward()
    assert "a" in names[4:]
