# SPDX-License-Identifier: Apache-2.0
"""What a single run of a program shows of each call."""

from __future__ import annotations

import torch
from torch._C import _set_grad_enabled
from torch.fx.graph import Graph
from torch.fx.graph_module import GraphModule

from ipufit.emulator._folding.example_run import run_example


def run(build, *arguments):
    """What was seen of a program's calls, by the names of their nodes."""
    graph = Graph()
    inputs = [graph.placeholder(f"x{index}") for index in range(len(arguments))]
    graph.output((build(graph, *inputs),))
    module = GraphModule(torch.nn.Module(), graph)
    seen = run_example(module, arguments, is_grad_enabled=True)
    return {node.name: what for node, what in seen.items()}


def test_a_write_is_seen_through_a_view():
    x = torch.ones(2, 3)

    def build(graph, x):
        double = graph.call_method("mul", (x, 2))
        view = graph.call_method("view", (double, -1))
        graph.call_method("add_", (view, 1))
        return double

    seen = run(build, x)
    assert seen["add_"].written == seen["mul"].touched - seen["x0"].touched
    assert seen["view"].passed_on == seen["add_"].written
    assert not seen["mul"].passed_on
    assert seen["mul"].value.sum() == 18
    assert x.sum() == 6  # the argument itself is as it was


def test_random_numbers_are_seen_and_given_back():
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    seen = run(lambda g, x: g.call_function(torch.randn_like, (x,)), torch.ones(2))
    assert seen["randn_like"].is_random
    assert not seen["x0"].is_random
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_grad_mode_is_followed_but_not_set():
    def build(graph, x):
        before = graph.call_method("mul", (x, 2))
        graph.call_function(_set_grad_enabled, (False,))
        return graph.call_method("add", (before, 1))

    seen = run(build, torch.ones(2))
    assert seen["mul"].is_grad_enabled
    assert not seen["add"].is_grad_enabled
    assert torch.is_grad_enabled()
    assert not seen["mul"].value.requires_grad


def test_new_memory_is_counted_inside_calls_too():
    def build(graph, x):
        view = graph.call_method("view", (x, 1, 100))
        return graph.call_function(torch.nn.functional.gelu, (view,))

    seen = run(build, torch.ones(100))
    assert seen["view"].new_bytes == 0
    assert seen["gelu"].new_bytes == 400


def test_results_and_constants_are_there():
    graph = Graph()
    x = graph.placeholder("x")
    constant = graph.get_attr("constant")
    pair = graph.call_method("chunk", (graph.call_method("add", (x, constant)), 2))
    graph.output((pair,))
    root = torch.nn.Module()
    root.register_buffer("constant", torch.ones(4))
    seen = run_example(GraphModule(root, graph), [torch.ones(4)], is_grad_enabled=False)
    values = list(seen.values())
    assert [len(part) for part in values[-1].value] == [2, 2]
    assert torch.equal(values[-2].value, torch.full((4,), 2.0))


def test_only_arguments_that_change_are_copied():
    graph = Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    graph.output((graph.call_method("add_", (x, weight)),))
    module = GraphModule(torch.nn.Module(), graph)
    arguments = [torch.ones(3, requires_grad=True), torch.ones(3)]
    seen = run_example(module, arguments, is_grad_enabled=True, unchanged={0})
    kept, copied, _ = (record.value for record in seen.values())
    assert kept.data_ptr() == arguments[0].data_ptr()
    assert copied.data_ptr() != arguments[1].data_ptr()
    assert arguments[1].tolist() == [1.0, 1.0, 1.0]
