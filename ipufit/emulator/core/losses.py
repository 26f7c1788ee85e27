# SPDX-License-Identifier: Apache-2.0
"""The final loss of a training program.

`identity_loss` and each loss function that is one operator of torch mark their
result. A marker from which another marker is computed is an intermediate loss;
exactly one marker must remain (PopTorch, `RemoveSurplusIdentityLosses.cpp`).

Operators are marked (PopTorch, `LossOps.cpp`), not the functions of
`torch.nn.functional` that consist of several operators. `cross_entropy` of
probabilities has no marker; with label smoothing the part without smoothing is
marked; for `kl_div(reduction="batchmean")` the sum is.

While a model is traced, an intermediate loss has the shape []. When PopTorch
compiles, it flattens the operand and sums it, so that the shape becomes [1]
(PopTorch, `RemoveSurplusIdentityLosses.cpp`).
"""

from __future__ import annotations

from typing import Any, Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _nn
from torch.fx.graph import Graph
from torch.fx.node import Node, map_arg

from ..errors import createPoptorchError
from ..ops import identity_loss
from .float16 import device_function
from .graph import (
    effects_of,
    error_about,
    map_tensors,
    node_arguments,
)

_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss
    ctc_loss hinge_embedding_loss kl_div l1_loss
    margin_ranking_loss mse_loss nll_loss nll_loss_nd poisson_nll_loss smooth_l1_loss
    soft_margin_loss triplet_margin_loss
""".split()  # noqa: SIM905 - one per line would be longer
_REDUCED_BEFORE = {F.l1_loss, _nn.l1_loss}  # type: ignore[attr-defined,unused-ignore]
"""Losses whose marker is put on what is reduced already (PopTorch, `l1lossHandler`)."""

_CROSS_ENTROPY = {F.cross_entropy, _nn.cross_entropy_loss}  # type: ignore[attr-defined,unused-ignore]
_BUILT_IN = {getattr(home, n, None) for home in (F, torch, _nn) for n in _LOSSES}
_MARKED = {identity_loss} | _CROSS_ENTROPY | _BUILT_IN - {None}


def add_final_loss(graph: Graph, results: Mapping[Node, Any]) -> dict[Node, Any]:
    """Make the loss of a training program its last result.

    The markers of intermediate losses are removed as PopTorch does it: their results
    have one dimension of one element.

    Args:
        graph: The traced program, without dead operations.
        results: Result of each node while the program was traced.

    Returns:
        For nodes whose shape has changed, a result of the new shape.

    Raises:
        Error: There is no marker, or more than one that is final; the final loss isn't
            one number; or an operation can't take the shape of an intermediate loss.
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
    result = results[markers[loss]]
    if result.numel() > 1:
        raise error_about(
            f"Loss tensor must be a scalar tensor, but that of {loss} has the shape "
            f"{list(result.shape)}. Reduce it: poptorch.identity_loss(loss, "
            "reduction='mean') or 'sum'.",
            loss,
        )
    marked = [markers[m] for m in markers if m in surplus and _reduces(m, results)]
    shapes = _reduce_to_one_element(graph, marked, results)
    for marker, node in markers.items():
        if marker is not node and marker is not loss:
            graph.erase_node(marker)
    *_, output = graph.nodes
    output.args = ((*output.args[0], loss),)
    return shapes


def _markers(graph: Graph, results: Mapping[Node, Any]) -> dict[Node, Node]:
    """Map each marker to the node of the marked loss function.

    They are the same node unless only a part of the function is marked. Then a node for
    this part is inserted: the same function with another argument.
    """
    markers: dict[Node, Node] = {}
    for node in list(graph.nodes):
        function: Any = node.target
        if function not in _MARKED:
            continue
        arguments = node_arguments(node)
        changes: dict[str, Any] = {}
        if function in _CROSS_ENTROPY:
            scores, target = (results[arguments[name]] for name in ("input", "target"))
            if scores.shape == target.shape:  # which torch takes for probabilities
                continue
            if arguments.get("label_smoothing"):
                changes = {"label_smoothing": 0.0}
        elif function is F.kl_div and arguments.get("reduction") == "batchmean":
            changes = {"reduction": "sum"}
        marker = node
        if changes:
            arguments.update(changes)
            args = arguments.pop("input"), arguments.pop("target")
            with graph.inserting_before(node):
                marker = graph.call_function(node.target, args, arguments)
            marker.meta.update(node.meta)
        markers[marker] = node
    return markers


def _surplus(graph: Graph, markers: Mapping[Node, Node]) -> set[Node]:
    """Find the markers of intermediate losses, also those used through memory."""
    marker_of = {node: marker for marker, node in markers.items()}
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
        if node in marker_of:
            known = known | {marker_of[node]}
        before[node] = known
        for memory in effects.writes:
            written[memory] = written.get(memory, set()) | known
    return surplus


def _reduces(marker: Node, results: Mapping[Node, Any]) -> bool:
    """Return whether PopTorch reduces a marker's operand when it removes the marker."""
    is_kept = node_arguments(marker).get("reduction") in ("none", 0)
    is_kept = is_kept or marker.target in _REDUCED_BEFORE
    result = results.get(marker)
    return not is_kept and (result is None or result.dim() == 0)


def _reduce_to_one_element(
    graph: Graph, losses: Collection[Node], results: Mapping[Node, Any]
) -> dict[Node, Any]:
    """Change intermediate losses to the shape [1], and update later shapes.

    Args:
        graph: The traced program.
        losses: Nodes whose results are one number.
        results: Result of each node while the program was traced.

    Returns:
        For nodes that follow from reshaped losses, a result of the new shape.

    Raises:
        Error: An operation doesn't take the new shapes.
    """
    values: dict[Node, Any] = {}  # of nodes that follow from reshaped losses

    def reshape(node: Node) -> None:
        with graph.inserting_after(node):
            row = graph.call_method("reshape", (node, (1,)))
        node.replace_all_uses_with(row, lambda user: user is not row)
        row.meta.update(block=node.meta.get("block"), effects=effects_of(node))
        values[row] = torch.zeros_like(results[node]).reshape(1)

    def zeros(node: Node) -> Any:
        return map_tensors(values.get(node, results.get(node)), torch.zeros_like)

    def call(node: Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), zeros)
        return device_function(node)(*args, **kwargs)

    with torch.no_grad():
        for node in list(graph.nodes)[:-1]:
            changed = [n for n in node.all_input_nodes if n in values]
            function: Any = node.target
            module = getattr(function, "__module__", None) or ""
            is_own = module.startswith("ipufit.emulator") and function != identity_loss
            if changed and not is_own:  # the result of an own one keeps its shape
                try:
                    values[node] = call(node)
                except (RuntimeError, ValueError, TypeError, IndexError) as error:
                    base = results.get(node)
                    is_number = isinstance(base, Tensor) and base.dim() == 0
                    if not is_number or not effects_of(node).writes:
                        raise error_about(
                            f"`{node}` doesn't take the result of a loss that is only "
                            f"a step on the way to the final one: {error}. On the "
                            "device that has the shape [1], not [] (PopTorch, "
                            "`RemoveSurplusIdentityLosses.cpp`). Give it a shape of "
                            "its own first: `loss.reshape(())`.",
                            node,
                        ) from error
                    # PopTorch replaces in-place operations before it computes shapes
                    # (PopTorch, `InplaceOps.cpp`), so a number becomes a row; torch
                    # keeps the shape of the tensor that is changed.
                    for source in changed:
                        if values[source].shape == (1,):
                            with graph.inserting_before(node):
                                number = graph.call_method("reshape", (source, ()))
                            node.replace_input_with(source, number)
                            values[number] = values[source].reshape(())
                    values[node] = call(node)
                    reshape(node)
            if node in losses:
                reshape(node)
    for loss in losses:  # reshapes to [1] and back to [] are spared
        for row in [user for user in loss.users if user.args[1:] == ((1,),)]:
            for number in list(row.users):
                if number.target == "reshape" and number.args[1:] == ((),):
                    number.replace_all_uses_with(loss)
                    graph.erase_node(number)
            if not row.users:
                graph.erase_node(row)
    return values
