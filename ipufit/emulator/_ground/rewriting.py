# SPDX-License-Identifier: Apache-2.0
"""Copies of programs in which some operations are others."""

from __future__ import annotations

from typing import Callable

from torch.fx.graph import Graph
from torch.fx.graph_module import GraphModule
from torch.fx.node import Node


def rewritten(
    program: GraphModule,
    is_found: Callable[[Node], bool],
    change: Callable[[Node], None],
) -> GraphModule:
    """Copy a program, and change some of its operations there.

    Args:
        program: The program, which stays as it is.
        is_found: Tells for a node of it whether it is to be changed.
        change: Changes the copy of such a node in place.

    Returns:
        The copy; `program` itself if no node is to be changed.

    Example:
        >>> import torch
        >>> program = torch.fx.symbolic_trace(lambda x: torch.neg(x) + 1)
        >>> def negates(node):
        ...     return node.target is torch.neg
        >>> def take_root(node):
        ...     node.target = torch.sqrt
        >>> rewritten(program, negates, take_root)(torch.tensor(4.0))
        tensor(3.)
    """
    found = [node for node in program.graph.nodes if is_found(node)]
    if not found:
        return program
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(program.graph, copies))
    for node in found:
        change(copies[node])
    copy: GraphModule = GraphModule(program, graph)
    return copy
