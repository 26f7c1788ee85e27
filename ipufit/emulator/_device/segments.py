# SPDX-License-Identifier: Apache-2.0
"""Copies of programs that say which module's operations run, forward and backward.

A program knows of each operation in which module it was made. Operations of one module
that follow each other are a *segment*. A copy of the program calls a function where a
segment begins. The backward pass comes to the segments in the opposite order: torch
runs the operation that was recorded last first. So a hook on what a segment gives to
others tells that its part of the backward pass begins.
"""

from __future__ import annotations

import operator
from typing import Any, Callable, Iterable, Mapping, Sequence, Tuple

from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.graph_module import GraphModule
from torch.fx.node import Node

Function = Callable[..., Any]
"""The `forward` of a `GraphModule`."""

Hear = Callable[[str], None]
"""Takes the scope whose segment begins, such as `module/layer1`."""

_Scope = Tuple[str, ...]


class Marks:
    """Makes copies of programs, and keeps them.

    Args:
        begin: Called when a segment begins, forward or backward.
        end: Called when a program ends.

    Example:
        >>> import torch
        >>> graph = Graph()
        >>> x = graph.placeholder("x")
        >>> for scope in ("network/first/", "network/last/"):
        ...     x = graph.call_function(torch.neg, (x,))
        ...     x.meta["operator"] = (scope, "neg")
        >>> result = graph.output(x)
        >>> function = GraphModule(torch.nn.Module(), graph).forward
        >>> marks = Marks(print, lambda: print("end"))
        >>> marked = marks.marked(function)
        >>> result = marked(torch.ones(1, requires_grad=True))
        network/first
        network/last
        end
        >>> result.backward()
        network/last
        network/first
        >>> marks.marked(function) == marked
        True
    """

    def __init__(self, begin: Hear, end: Callable[[], None]) -> None:
        self._begin = begin
        self._end = end
        self._copies: dict[Function, Function] = {}

    def marked(self, function: Function) -> Function:
        """The copy of a program: it computes the same, and calls `begin` and `end`."""
        copy = self._copies.get(function)
        if copy is None:
            module: GraphModule = function.__self__  # type: ignore[attr-defined]
            graph = _with_marks(module.graph, self._turn)
            copy = self._copies[function] = GraphModule(module, graph).forward
        return copy

    def has(self, function: Function) -> bool:
        """Whether a copy of a program is kept."""
        return function in self._copies

    def forget(self) -> None:
        """Keep no copies any longer."""
        self._copies.clear()

    def _turn(
        self, ended: str | None, results: Sequence[Any], begun: str | None
    ) -> None:
        """Go from one segment to the next.

        Args:
            ended: Scope of the segment that ends; None if none does.
            results: Its values that others take.
            begun: Scope of the segment that begins; None at the end of the program.
        """
        if ended is not None:
            for result in results:
                if isinstance(result, Tensor) and result.grad_fn is not None:
                    result.grad_fn.register_prehook(self._hook(ended))
        if begun is None:
            self._end()
        else:
            self._begin(begun)

    def _hook(self, scope: str) -> Callable[[Any], None]:
        def reached(gradients: Any) -> None:
            self._begin(scope)

        return reached


def _with_marks(graph: Graph, turn: Callable[..., None]) -> Graph:
    """Copy a graph, with calls of `turn` between its segments."""
    scopes = _scopes_of(graph)
    segments = _segments(scopes)
    results: dict[int, list[Node]] = {}
    for node, segment in segments.items():
        if any(segments.get(user) != segment for user in node.users):
            results.setdefault(segment, []).append(node)
    copies: dict[Node, Node] = {}
    marked: Graph = Graph()
    latest: str | None = None
    current = -1

    def mark(begun: str | None) -> None:
        given = tuple(copies[node] for node in results.get(current, ()))
        marked.call_function(turn, (latest, given, begun))

    for node in graph.nodes:
        segment = segments.get(node, current)
        if segment != current:
            mark(scopes[node])
            latest, current = scopes[node], segment
        elif node.op == "output" and segments:
            mark(None)
        copies[node] = marked.node_copy(node, copies.__getitem__)
    return marked


def _segments(scopes: Mapping[Node, str]) -> dict[Node, int]:
    """Number the segments: runs of operations of one scope."""
    found: dict[Node, int] = {}
    latest, number = None, -1
    for node, scope in scopes.items():
        number += scope != latest
        latest = scope
        found[node] = number
    return found


def _scopes_of(graph: Graph) -> dict[Node, str]:
    """The scope of each operation, cut off where modules have names worth telling.

    What has been added to a program for an operation, and has no scope itself, counts
    to the operation that follows; the last ones to the one before.
    """
    known: dict[Node, _Scope | None] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        operation = node.meta.get("operator")
        if operation is not None:
            known[node] = tuple(operation[0].split("/")[:-1])
        else:
            is_item = node.target is operator.getitem
            known[node] = known.get(node.args[0]) if is_item else None
    _fill(reversed(list(known)), known)
    _fill(list(known), known)
    scopes = {node: scope or () for node, scope in known.items()}
    deepest = _deepest(set(scopes.values()))
    return {node: _cut(scope, deepest) for node, scope in scopes.items()}


def _fill(nodes: Iterable[Node], known: dict[Node, _Scope | None]) -> None:
    """Give nodes without a scope that of the last one that has one."""
    latest: _Scope | None = None
    for node in nodes:
        if known[node] is None:
            known[node] = latest
        latest = known[node]


def _deepest(scopes: set[_Scope]) -> _Scope:
    """The module whose children are told apart.

    From the root on it goes down as long as one child alone has children.
    """
    around: _Scope = ()
    while True:
        depth = len(around)
        inner = {
            s[: depth + 1] for s in scopes if s[:depth] == around and s[depth + 1 :]
        }
        if len(inner) != 1:
            return around
        (around,) = inner


def _cut(scope: _Scope, around: _Scope) -> str:
    """Cut a scope off one level below the last module that it shares with another."""
    shared = 0
    while scope[: shared + 1] == around[: shared + 1] and shared < len(around):
        shared += 1
    return "/".join(scope[: shared + 1])
