# SPDX-License-Identifier: Apache-2.0
"""Mark host transfers that overlap with computation, and check the marks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.node import Node

from ipufit.emulator._options.strategies import is_pipelined
from ipufit.emulator._tracing.operands import map_tensors
from ipufit.emulator._tracing.trace_state import current_trace
from ipufit.emulator.enums import OutputMode, OverlapMode
from ipufit.emulator.errors import createPoptorchError

if TYPE_CHECKING:
    from ipufit.emulator._options.options import Options


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Fetch inputs ahead of the computation that needs them.

    Compiling refuses it unless it is all that is done to an input, under a strategy
    that is not pipelined, with IO tiles, and `OutputMode.All` or `Sum`.

    Args:
        input_tensors: Inputs of the model: a tensor, or tuples, lists and dicts of
            them.
        mode: How many steps ahead.

    Returns:
        The same structure and values.

    Example:
        >>> import torch
        >>> set_overlap_for_input([torch.tensor([1.0])], OverlapMode.NoOverlap)
        [tensor([1.])]
    """
    return _mark(overlapped_input, input_tensors, mode)


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Send outputs while the device computes on.

    Compiling refuses it unless what is marked is returned, and returned once; the
    options must allow it as for `set_overlap_for_input`.

    Args:
        output_tensors: Outputs of the model: a tensor, or tuples, lists and dicts of
            them.
        mode: How many steps behind.

    Returns:
        The same structure and values.

    Example:
        >>> import torch
        >>> set_overlap_for_output(torch.tensor([1.0]), OverlapMode.NoOverlap)
        tensor([1.])
    """
    return _mark(overlapped_output, output_tensors, mode)


def overlapped_input(tensor: Tensor) -> Tensor:
    """Mark an input, as `set_overlap_for_input` does."""
    marked: Tensor = tensor.view_as(tensor)
    return marked


def overlapped_output(tensor: Tensor) -> Tensor:
    """Mark an output, as `set_overlap_for_output` does."""
    marked: Tensor = tensor.view_as(tensor)
    return marked


def _mark(mark: Any, tensors: Any, mode: OverlapMode) -> Any:
    trace = current_trace()
    if mode.value == OverlapMode.NoOverlap.value or trace is None:
        return tensors
    return map_tensors(tensors, lambda tensor: trace.record(mark, tensor))


def check_overlap(graph: Graph, options: Options, *, has_loss: bool) -> None:
    """Refuse marks of a traced program that are in the wrong place.

    Args:
        graph: The program.
        options: The options that it is compiled with.
        has_loss: Whether the last result of the graph is the loss, which the model
            need not return.

    Raises:
        Error: A mark is in the wrong place, or the options don't allow any.
    """
    results = list(next(iter(reversed(graph.nodes))).args[0])
    returned = results[:-1] if has_loss else results
    marks = [
        n for n in graph.nodes if n.target in (overlapped_input, overlapped_output)
    ]
    for node in marks:
        if node.target is overlapped_input:
            _check_input(node, graph)
        else:
            _check_output(node, returned)
    if marks:
        _check_options(options)


def _check_input(mark: Node, graph: Graph) -> None:
    marked = mark.args[0]
    inputs = [
        node
        for node in graph.nodes
        if node.op == "placeholder" and str(node.target).startswith("input_")
    ]
    if marked not in inputs:
        raise createPoptorchError(
            "poptorch.set_overlap_for_input applied on a node which is not a tensor "
            f"input to the model: {marked}."
        )
    if isinstance(marked, Node) and len(marked.users) > 1:
        raise createPoptorchError(
            "poptorch.set_overlap_for_input must be the only op applied to an input. "
            f"This is not the case for input {inputs.index(marked)} to the model. "
            "Compute with the tensor that it returns."
        )


def _check_output(mark: Node, returned: list[Node]) -> None:
    if mark not in returned:
        raise createPoptorchError(
            "poptorch.set_overlap_for_output applied on a node which is not a tensor "
            f"output to the model: {mark.args[0]}."
        )
    if returned.count(mark) > 1 or mark.args[0] in returned:
        raise createPoptorchError(
            "poptorch.set_overlap_for_output cannot be used with a tensor that is "
            "returned twice. Please check all returned tensors including those nested "
            "in tuples/lists."
        )


def _check_options(options: Options) -> None:
    if is_pipelined(options._execution_strategy):
        raise createPoptorchError(
            "Overlapped IO is not supported with poptorch.PipelinedExecution. If you "
            "are using only one IPU, please switch to poptorch.ShardedExecution."
        )
    if not options.TensorLocations.exists("numIOTiles"):
        raise createPoptorchError(
            "No IO tiles allocated. You must allocate at least 32 IO tiles using "
            "poptorch.Options().TensorLocations.numIOTiles."
        )
    if options.output_mode not in (OutputMode.All.value, OutputMode.Sum.value):
        raise createPoptorchError(
            "Overlapped IO needs every micro-batch's output: OutputMode.All or "
            f"OutputMode.Sum, not {OutputMode(options.output_mode).name}. Set "
            "poptorch.Options().outputMode."
        )
