# SPDX-License-Identifier: Apache-2.0
"""Combinations of operations that PopTorch doesn't compile.

Tracing refuses operations for their own arguments (`_tracing/limits.py`). The checks
here need to know where the arguments come from.
"""

from __future__ import annotations

from typing import Any

from torch.fx.graph import Graph
from torch.fx.node import Node

from ipufit.emulator._tracing.constant_nodes import function_name, is_in_place
from ipufit.emulator.errors import createPoptorchError


def check_graph(graph: Graph, constants: set[Node]) -> None:
    """Refuse a traced program that doesn't compile.

    Args:
        graph: The traced program.
        constants: Nodes that are computed while the program is compiled.

    Raises:
        Error: `torch.triu` or the offsets of an embedding bag aren't of constants, or
            elements that aren't adjacent are changed in place.

    Example:
        >>> import torch
        >>> graph = Graph()
        >>> _ = graph.call_function(torch.triu, (graph.placeholder("x"),))
        >>> check_graph(graph, constants=set())
        Traceback (most recent call last):
            ...
        ipufit.emulator.errors.Error: ... torch.triu is only supported within ...
    """
    for node in graph.nodes:
        if node not in constants:
            check_node(node, constants)


def check_node(node: Node, constants: set[Node]) -> None:
    """Refuse a node that doesn't compile, as `check_graph` does.

    Args:
        node: A node that isn't constant.
        constants: Nodes that are computed while the program is compiled.

    Raises:
        Error: As from `check_graph`.
    """
    name = function_name(node)
    if name in ("triu", "triu_"):
        raise createPoptorchError(
            "torch.triu is only supported within constant expressions: multiply by "
            "the triangle of a constant, torch.triu(torch.ones(n, n))."
        )
    if name == "embedding_bag":
        _check_offsets(node, constants)
    if is_in_place(node):
        _check_steps(node)


def _check_offsets(node: Node, constants: set[Node]) -> None:
    positional = node.args[2] if len(node.args) > 2 else None
    offsets = node.kwargs.get("offsets", positional)
    if isinstance(offsets, Node) and offsets not in constants:
        raise createPoptorchError(
            "Unsupported aten::embedding_bag operation: offsets tensor must be a "
            "constant, made in `forward` with torch.tensor or torch.arange."
        )


def _check_steps(node: Node) -> None:
    """Refuse a write to slices (also slices of slices) with a step other than 1."""
    indices = [node.args[1]] if function_name(node) == "__setitem__" else []
    base = node.args[0] if node.args else None
    while isinstance(base, Node) and function_name(base) == "__getitem__":
        indices.append(base.args[1])
        base = base.args[0]
    if any(_step(part) not in (None, 1) for index in indices for part in _parts(index)):
        raise createPoptorchError(
            "In-place modification of slices with step size other than 1 is not "
            "supported. Use torch.where with a constant mask."
        )


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _step(part: Any) -> Any:
    return part.step if isinstance(part, slice) else None
