# SPDX-License-Identifier: Apache-2.0
"""The shapes of losses that are only a step on the way to another one.

While a model is traced they are numbers, of shape []. PopTorch replaces them when it
compiles: it flattens what they are made from into one row, and adds up that row, so
that their shape is [1] (PopTorch, `RemoveSurplusIdentityLosses.cpp`).
"""

from __future__ import annotations

from typing import Any, Collection, Mapping

import torch
from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.node import Node, map_arg

from ipufit.emulator._ops.identity_loss import identity_loss
from ipufit.emulator._tracing.half import original
from ipufit.emulator._tracing.liveness import effects_of, note_effects
from ipufit.emulator._tracing.operands import map_tensors
from ipufit.emulator.errors import createPoptorchError

_EMULATOR = "ipufit.emulator"
_ERRORS = (RuntimeError, ValueError, TypeError, IndexError)


def reduce_to_one_element(
    graph: Graph, losses: Collection[Node], results: Mapping[Node, Any]
) -> None:
    """Give results of losses the shape [1], with all that is computed from them.

    Args:
        graph: The program.
        losses: Nodes whose results are one number.
        results: What the nodes gave while the program was traced.

    Raises:
        Error: A call doesn't take the new shapes.

    Example:
        >>> graph = Graph()
        >>> x = graph.placeholder("x")
        >>> loss = graph.call_function(torch.sum, (x,))
        >>> output = graph.output((loss,))
        >>> reduce_to_one_element(graph, [loss], {loss: torch.ones(())})
        >>> output.args
        ((reshape,),)
    """
    shapes = _Shapes(graph, results)
    with torch.no_grad():
        for node in list(graph.nodes):
            if node.op == "output":
                break
            shapes.follow(node)
            if node in losses:
                shapes.reshape(node)
    for loss in losses:
        _spare_reshapes(graph, loss)


def _spare_reshapes(graph: Graph, loss: Node) -> None:
    """Let those take the number itself that make a number of the row anyway."""
    for row in list(loss.users):
        if row.args[1:] == ((1,),):
            for number in list(row.users):
                if number.target == "reshape" and number.args[1:] == ((),):
                    number.replace_all_uses_with(loss)
                    graph.erase_node(number)
            if not row.users:
                graph.erase_node(row)


class _Shapes:
    """Computes, on zeros, what is computed from the results of new shapes."""

    def __init__(self, graph: Graph, results: Mapping[Node, Any]) -> None:
        self._graph = graph
        self._results = results
        self._values: dict[Node, Any] = {}

    def reshape(self, node: Node) -> None:
        """Let all users of a node take its result with the shape [1]."""
        with self._graph.inserting_after(node):
            row = self._graph.call_method("reshape", (node, (1,)))
        node.replace_all_uses_with(row, lambda user: user is not row)
        row.meta["block"] = node.meta.get("block")
        note_effects(row, effects_of(node))
        self._values[row] = torch.zeros_like(self._results[node]).reshape(1)

    def follow(self, node: Node) -> None:
        """Call a node on the new shapes, if it takes one of them."""
        changed = [n for n in node.all_input_nodes if n in self._values]
        if not changed:
            return
        function = original(node.target)
        module = getattr(function, "__module__", None) or ""
        if module.startswith(_EMULATOR) and function is not identity_loss:
            return  # its result has the shape that it had
        try:
            self._values[node] = self._call(node)
        except _ERRORS as error:
            if not self._grows(node):
                raise _refusal(node, error) from error
            self._shrink(node, changed)
            self._values[node] = self._call(node)
            self.reshape(node)

    def _grows(self, node: Node) -> bool:
        """Whether a call in place of a number gives a row of one in PopTorch.

        There calls in place become others before shapes are computed (PopTorch,
        `InplaceOps.cpp`); torch keeps the shape of what is changed.
        """
        base = self._results.get(node)
        is_number = isinstance(base, Tensor) and base.dim() == 0
        return is_number and bool(effects_of(node).writes)

    def _shrink(self, node: Node, changed: list[Node]) -> None:
        for source in changed:
            if self._values[source].shape == (1,):
                with self._graph.inserting_before(node):
                    number = self._graph.call_method("reshape", (source, ()))
                node.replace_input_with(source, number)
                self._values[number] = self._values[source].reshape(())

    def _call(self, node: Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), self._value)
        args, kwargs = map_tensors((args, kwargs), torch.zeros_like)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        target: Any = node.target
        return target(*args, **kwargs)

    def _value(self, node: Node) -> Any:
        return self._values.get(node, self._results.get(node))


def _refusal(node: Node, error: Exception) -> Exception:
    return createPoptorchError(
        f"`{node}` doesn't take the result of a loss that is only a step on the way to "
        f"the final one: {error}. On the device that has the shape [1], not [] "
        "(PopTorch, `RemoveSurplusIdentityLosses.cpp`). Give it a shape of its own "
        "first: `loss.reshape(())`."
    )
