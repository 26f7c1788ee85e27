# SPDX-License-Identifier: Apache-2.0
"""Computations from losses that have the shape [1] on the device."""

from __future__ import annotations

import pytest
import torch
from torch.fx.graph import Graph

import ipufit.emulator as poptorch
from ipufit.emulator import Error
from ipufit.emulator._program.losses import reduce_to_one_element


def program(function, *others):
    """A loss, and what `function` makes of it and of other numbers."""
    graph = Graph()
    x = graph.placeholder("x")
    loss = graph.call_function(torch.sum, (x,))
    numbers = [graph.call_function(torch.max, (x,)) for _ in others]
    result = function(graph, loss, *numbers)
    graph.output((result,))
    results = {x: torch.ones(3), loss: torch.ones(())}
    results.update(dict.fromkeys(numbers, torch.ones(())))
    return graph, loss, results


def test_users_take_the_new_shape():
    graph, loss, results = program(
        lambda g, loss: g.call_function(torch.mul, (loss, 2.0))
    )
    reduce_to_one_element(graph, [loss], results)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert module(torch.ones(3))[0].tolist() == [6.0]


def test_a_call_that_cannot_take_it_is_named():
    graph, loss, results = program(
        lambda g, loss, other: g.call_function(torch.stack, ([loss, other],)), 1
    )
    with pytest.raises(Error, match=r"`stack` doesn't take .*\[1\], not \[\]"):
        reduce_to_one_element(graph, [loss], results)


def test_without_removed_losses_nothing_changes():
    graph, _, results = program(lambda g, loss: g.call_function(torch.mul, (loss, 2.0)))
    before = len(graph.nodes)
    reduce_to_one_element(graph, [], results)
    assert len(graph.nodes) == before


def test_a_number_made_of_a_loss_costs_no_reshapes():
    """`loss.reshape(())`, as PopTorch's shapes demand it, is the loss itself here."""

    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            loss = torch.nn.functional.mse_loss(self.weight * x, x * 2)
            number = loss.reshape(())
            kept = torch.stack([number.detach(), number.detach() * 2])
            return kept, poptorch.identity_loss(number * 0.5, reduction="sum")

    model = Half()
    sgd = poptorch.optim.SGD(model.parameters(), lr=1.0)
    training = poptorch.trainingModel(model, optimizer=sgd)
    kept, half = training(torch.ones(3))
    assert (kept.tolist(), half.item()) == ([1.0, 2.0], 0.5)
    torch.testing.assert_close(model.weight.detach(), torch.full((3,), 4.0 / 3))
    names = [
        str(node.target) for node in training._executable.program.graph.graph.nodes
    ]
    assert "identity_loss" in " ".join(names)
    assert names.count("reshape") == 0
