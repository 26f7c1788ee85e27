# SPDX-License-Identifier: Apache-2.0
"""torch's kernels, called without the Python functions around them."""

from __future__ import annotations

import pytest
import torch
from torch.fx.graph import Graph
from torch.fx.graph_module import GraphModule

from ipufit.emulator._program.direct_calls import make_direct

F = torch.nn.functional
X = torch.randn(6, 4)
Y = torch.tensor([0, 1, 2, 3, -100, 1])
WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0])


def run(function, args, kwargs):
    """The result of a call in a program that is made direct, and what it calls."""
    graph = Graph()
    inputs = [graph.placeholder(f"x{index}") for index in range(len(args))]
    call = graph.call_function(function, tuple(inputs), kwargs)
    graph.output(call)
    make_direct(graph)
    return GraphModule(torch.nn.Module(), graph)(*args), call.target


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (F.relu, (X,), {"inplace": False}),
        (F.relu, (X,), {}),
        (F.cross_entropy, (X, Y), {}),
        (F.cross_entropy, (X, Y), {"reduction": "sum", "size_average": None}),
        (
            F.cross_entropy,
            (X, Y.clamp(min=0)),
            {"reduction": "none", "ignore_index": 1},
        ),
        (F.cross_entropy, (X, Y), {"weight": None, "label_smoothing": 0.1}),
        (F.cross_entropy, (X, X.softmax(1)), {"reduce": None}),
    ],
)
def test_a_direct_call_gives_the_same_bits(function, args, kwargs):
    result, target = run(function, args, kwargs)
    assert target is not function
    assert torch.equal(result, function(*args, **kwargs))


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (F.relu, (X.clone(),), {"inplace": True}),
        (F.gelu, (X,), {}),
        (F.cross_entropy, (X, Y, WEIGHT), {}),
        (F.cross_entropy, (X, Y), {"size_average": False}),
    ],
)
def test_other_calls_stay(function, args, kwargs):
    assert run(function, args, kwargs)[1] is function
