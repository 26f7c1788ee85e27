# SPDX-License-Identifier: Apache-2.0
"""The parts of a traced program that are constant.

PopTorch computes constant expressions while it compiles (`EvaluateConstexprs.cpp`),
with all of torch's functions. What is left has to run on the device.
"""

from __future__ import annotations

from typing import Collection

from torch.fx.graph import Graph
from torch.fx.node import Node

from ipufit.emulator._tracing.half import original
from ipufit.emulator._tracing.tensor_devices import RANDOM_FACTORIES

_CHANGES = frozenset({"__setitem__", "__iand__", "__ior__", "__ixor__"})
_RANDOM = frozenset(
    """
    _sample_dirichlet _standard_gamma alpha_dropout bernoulli bernoulli_ binomial
    dropout dropout1d dropout2d dropout3d
    exponential_ feature_alpha_dropout feature_dropout multinomial normal_ poisson
    rand_like randint_like randn_like random_ rrelu uniform_
    """.split()  # noqa: SIM905 - one per line would be a page
).union(factory.__name__ for factory in RANDOM_FACTORIES)

_OF_A_SHAPE = frozenset(
    form.format(name)
    for name in ("empty", "full", "ones", "zeros")
    for form in ("{}_like", "new_{}")
)
"""Functions of the shape and type of a tensor, which are constant."""


def function_name(node: Node) -> str:
    """The name of the function that a node calls.

    Example:
        >>> import torch
        >>> graph = Graph()
        >>> function_name(graph.call_function(torch.relu, (graph.placeholder("x"),)))
        'relu'
    """
    target = original(node.target)
    return getattr(target, "__name__", str(target))


def constant_nodes(graph: Graph, constant_inputs: Collection[str]) -> set[Node]:
    """Find the nodes whose value is the same in every run.

    Args:
        graph: A traced program.
        constant_inputs: Names of inputs that are compiled in.

    Example:
        >>> import torch
        >>> graph = Graph()
        >>> ones = graph.call_function(torch.ones, (2,))
        >>> total = graph.call_function(torch.add, (graph.placeholder("x"), ones))
        >>> constant_nodes(graph, ()) == {ones}
        True
    """
    constants: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            is_constant = node.target in constant_inputs
        else:
            name = function_name(node)
            is_constant = name in _OF_A_SHAPE or (
                name not in _RANDOM and constants.issuperset(node.all_input_nodes)
            )
        if is_constant:
            constants.add(node)
    return constants


def is_in_place(node: Node) -> bool:
    """Whether a node changes the tensor that is its first argument.

    Example:
        >>> graph = Graph()
        >>> is_in_place(graph.call_method("add_", (graph.placeholder("x"), 1)))
        True
    """
    name = function_name(node)
    return name in _CHANGES or (name.endswith("_") and not name.endswith("__"))
