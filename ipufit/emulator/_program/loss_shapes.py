# SPDX-License-Identifier: Apache-2.0
"""The shapes of intermediate losses, from which the final loss is computed.

While a model is traced they are numbers, of shape []. When PopTorch compiles, it
flattens their operands into one row and adds up that row, so that their shape becomes
[1] (PopTorch, `RemoveSurplusIdentityLosses.cpp`).
"""

from __future__ import annotations

from typing import Any, Collection, Mapping

import torch
from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.node import Node, map_arg

from ipufit.emulator._ops.identity_loss import identity_loss
from ipufit.emulator._tracing.blame import blaming
from ipufit.emulator._tracing.half import original
from ipufit.emulator._tracing.liveness import effects_of, note_effects
from ipufit.emulator._tracing.operands import map_tensors
from ipufit.emulator.errors import createPoptorchError

_EMULATOR = "ipufit.emulator"
_ERRORS = (RuntimeError, ValueError, TypeError, IndexError)


def reduce_to_one_element(
    graph: Graph, losses: Collection[Node], results: Mapping[Node, Any]
) -> None:
    """Give intermediate losses the shape [1], and recompute the shapes after them.

    Args:
        graph: The traced program.
        losses: Nodes whose results are one number.
        results: Result of each node while the program was traced.

    Raises:
        Error: An operation doesn't take the new shapes.

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
    """Remove reshapes of a loss to [1] and back to []."""
    for row in list(loss.users):
        if row.args[1:] == ((1,),):
            for number in list(row.users):
                if number.target == "reshape" and number.args[1:] == ((),):
                    number.replace_all_uses_with(loss)
                    graph.erase_node(number)
            if not row.users:
                graph.erase_node(row)


class _Shapes:
    """Recomputes, on zeros, the operations that follow from reshaped losses."""

    def __init__(self, graph: Graph, results: Mapping[Node, Any]) -> None:
        self._graph = graph
        self._results = results
        self._values: dict[Node, Any] = {}

    def reshape(self, node: Node) -> None:
        """Give all users of a node its result with the shape [1]."""
        with self._graph.inserting_after(node):
            row = self._graph.call_method("reshape", (node, (1,)))
        node.replace_all_uses_with(row, lambda user: user is not row)
        row.meta["block"] = node.meta.get("block")
        note_effects(row, effects_of(node))
        self._values[row] = torch.zeros_like(self._results[node]).reshape(1)

    def follow(self, node: Node) -> None:
        """Recompute a node if one of its operands has a new shape."""
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
        """Whether an in-place operation on a number gives shape [1] in PopTorch.

        PopTorch replaces in-place operations before it computes shapes (PopTorch,
        `InplaceOps.cpp`); torch keeps the shape of the tensor that is changed.
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
    refusal = createPoptorchError(
        f"`{node}` doesn't take the result of a loss that is only a step on the way to "
        f"the final one: {error}. On the device that has the shape [1], not [] "
        "(PopTorch, `RemoveSurplusIdentityLosses.cpp`). Give it a shape of its own "
        "first: `loss.reshape(())`."
    )
    return blaming(refusal, node)
