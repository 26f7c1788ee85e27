# SPDX-License-Identifier: Apache-2.0
"""Finds the final loss of a traced training model.

`identity_loss` and the loss functions that are one operator of torch mark their result.
A marker from which another marker is computed is only a step on the way; exactly one
marker must remain (PopTorch, `RemoveSurplusIdentityLosses.cpp`).

Markers are put on operators (PopTorch, `LossOps.cpp`), not on what
`torch.nn.functional` makes of them: `cross_entropy` of probabilities has none, with
label smoothing the marker is on the part without smoothing, and that of
`kl_div(reduction="batchmean")` is on the sum.

While a model is traced, intermediate losses are numbers, of shape []. When PopTorch
compiles, it flattens their operands into one row and adds up that row, so that their
shape becomes [1] (PopTorch, `RemoveSurplusIdentityLosses.cpp`).
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _nn
from torch.fx.graph import Graph
from torch.fx.node import Node, map_arg

from ipufit.emulator._ops.markers import identity_loss
from ipufit.emulator._tracing.half import original
from ipufit.emulator._tracing.nodes import effects_of, error_about
from ipufit.emulator._tracing.operation import map_tensors
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
        row.meta["effects"] = effects_of(node)
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
    return error_about(
        f"`{node}` doesn't take the result of a loss that is only a step on the way to "
        f"the final one: {error}. On the device that has the shape [1], not [] "
        "(PopTorch, `RemoveSurplusIdentityLosses.cpp`). Give it a shape of its own "
        "first: `loss.reshape(())`.",
        node,
    )


_NAMES = """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss
    cross_entropy cross_entropy_loss ctc_loss hinge_embedding_loss kl_div l1_loss
    margin_ranking_loss mse_loss nll_loss nll_loss_nd poisson_nll_loss smooth_l1_loss
    soft_margin_loss triplet_margin_loss
"""


def _named(*names: str) -> frozenset[Callable[..., object]]:
    return frozenset(
        getattr(home, name)
        for home in (F, torch, _nn)
        for name in names
        if hasattr(home, name)
    )


_BUILT_IN = _named(*_NAMES.split())
_CROSS_ENTROPY = _named("cross_entropy", "cross_entropy_loss")
_DIVERGENCE = _named("kl_div")
_REDUCED_BEFORE = _named("l1_loss")
"""Losses whose marker is put on what is reduced already (PopTorch, `l1lossHandler`)."""

_ARGUMENTS: Mapping[Callable[..., object], tuple[str, ...]] = {
    **{f: tuple(inspect.signature(f).parameters) for f in (F.cross_entropy, F.kl_div)},
    _nn.cross_entropy_loss: (  # type: ignore[attr-defined,unused-ignore]
        "self",
        "target",
        "weight",
        "reduction",
        "ignore_index",
        "label_smoothing",
    ),
}


def add_final_loss(graph: Graph, results: Mapping[Node, Any]) -> None:
    """Return the loss of a training program as its last result.

    The program becomes what PopTorch makes of it: the results of markers that are no
    longer needed have one dimension of one element.

    Args:
        graph: The traced program, without dead operations.
        results: Result of each node while the program was traced.

    Raises:
        Error: There is no marker, or more than one that is final; the final loss isn't
            one number; or an operation can't take the shape of an intermediate loss.

    Example:
        >>> graph = Graph()
        >>> _ = graph.output((graph.placeholder("x"),))
        >>> add_final_loss(graph, {})
        Traceback (most recent call last):
            ...
        ipufit.emulator.errors.Error: ... Couldn't find a loss in graph! ...
    """
    markers = _markers(graph, results)
    if not markers:
        raise createPoptorchError(
            "Couldn't find a loss in graph! A training model must compute a loss with "
            "one of torch's loss functions or mark it with poptorch.identity_loss, and "
            "must return something that depends on it: what no output depends on is "
            "eliminated first."
        )
    surplus = _surplus(graph, markers)
    final = [marker for marker in markers if marker not in surplus]
    if len(final) > 1:
        raise error_about(
            "Multiple independent losses found in graph. Graph must have one final "
            "loss. Wrap final graph loss in poptorch.identity_loss. "
            f"Found: {', '.join(str(node) for node in final)}.",
            *final,
        )
    (loss,) = final
    _refuse_vector(loss, results[markers[loss]])
    marked = [markers[m] for m in markers if m in surplus and _reduces(m, results)]
    reduce_to_one_element(graph, marked, results)
    for marker, node in markers.items():
        if marker is not node and marker is not loss:
            graph.erase_node(marker)
    *_, output = graph.nodes
    output.args = ((*output.args[0], loss),)


def _markers(graph: Graph, results: Mapping[Node, Any]) -> dict[Node, Node]:
    """Map each marker to the node of the marked loss function.

    They are the same node unless the marker is on a part of the function only.
    """
    markers: dict[Node, Node] = {}
    for node in list(graph.nodes):
        function = original(node.target)
        if node.op != "call_function":
            continue
        if function is identity_loss:
            markers[node] = node
        elif function in _CROSS_ENTROPY:
            if not _is_of_probabilities(node, results):
                smoothing = _argument(node, "label_smoothing") or 0.0
                changed: dict[str, Any] = {"label_smoothing": 0.0} if smoothing else {}
                markers[_part(graph, node, changed)] = node
        elif function in _BUILT_IN:
            is_divided = function in _DIVERGENCE and (
                _argument(node, "reduction") == "batchmean"
            )
            changed = {"reduction": "sum"} if is_divided else {}
            markers[_part(graph, node, changed)] = node
    return markers


def _part(graph: Graph, node: Node, changed: Mapping[str, Any]) -> Node:
    """Insert the part of a loss function that has the marker.

    It is the same function with some arguments changed; with none it is the whole.
    """
    if not changed:
        return node
    names = _ARGUMENTS[original(node.target)]
    arguments = {**dict(zip(names, node.args)), **node.kwargs, **changed}
    args = tuple(arguments.pop(name) for name in names[:2])
    with graph.inserting_before(node):
        part: Node = graph.call_function(node.target, args, arguments)  # type: ignore[arg-type,unused-ignore]
    part.meta.update(node.meta)
    return part


def _argument(node: Node, name: str) -> Any:
    names = _ARGUMENTS.get(original(node.target), ())
    return {**dict(zip(names, node.args)), **node.kwargs}.get(name)


def _is_of_probabilities(node: Node, results: Mapping[Node, Any]) -> bool:
    """Whether targets are probabilities: torch goes by their shape, the outputs'."""
    scores, target = (results[source] for source in _operands(node))
    is_same: bool = scores.shape == target.shape
    return is_same


def _operands(node: Node) -> list[Node]:
    names = _ARGUMENTS[original(node.target)][:2]
    return [_argument(node, name) for name in names]


def _surplus(graph: Graph, markers: Mapping[Node, Node]) -> set[Node]:
    """Find the markers from which another one is computed, also through memory."""
    inner = {node: marker for marker, node in markers.items() if marker is not node}
    before: dict[Node, set[Node]] = {}
    written: dict[int, set[Node]] = {}
    surplus: set[Node] = set()
    for node in graph.nodes:
        effects = effects_of(node)
        sources = [before[source] for source in node.all_input_nodes]
        sources += [written[m] for m in effects.reads if m in written]
        known = set().union(*sources)
        if node in markers:
            surplus |= known
            known = known | {node}
        if node in inner:
            known = known | {inner[node]}
        before[node] = known
        for memory in effects.writes:
            written[memory] = written.get(memory, set()) | known
    return surplus


def _reduces(marker: Node, results: Mapping[Node, Any]) -> bool:
    """Whether PopTorch reduces the operand of a marker when it removes the marker."""
    function = original(marker.target)
    reduction = marker.kwargs.get("reduction")
    if function is identity_loss and len(marker.args) > 1:
        reduction = marker.args[1]
    is_kept = reduction in ("none", 0) or function in _REDUCED_BEFORE
    result = results.get(marker)
    return not is_kept and (result is None or result.dim() == 0)


def _refuse_vector(loss: Node, result: Tensor) -> None:
    if result.numel() > 1:
        raise error_about(
            f"Loss tensor must be a scalar tensor, but that of {loss} has the shape "
            f"{list(result.shape)}. Reduce it: poptorch.identity_loss(loss, "
            "reduction='mean') or 'sum'.",
            loss,
        )
