# SPDX-License-Identifier: Apache-2.0
"""Cut the operations of a function out of a trace, as a program of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.graph_module import GraphModule
from torch.fx.node import Node

from ipufit.emulator._tracing.liveness import erase_dead
from ipufit.emulator._tracing.recording import Recording
from ipufit.emulator._tracing.refusals import host_tensor_among
from ipufit.emulator.errors import createPoptorchError


@dataclass(frozen=True, eq=False)
class Body:
    """A function that the device runs as often as a loop or a branch asks for it.

    Attributes:
        program: Takes the inputs, then the tensors from around the function.
        captured: Tensors from around it, in order, as they are in the trace.
        example: Tensors that the function returned while it was traced.
    """

    program: GraphModule
    captured: list[Tensor]
    example: list[Tensor]

    @property
    def graph(self) -> Graph:
        """The operations of the function."""
        return self.program.graph

    def run(self, inputs: list[Tensor], captured: list[Tensor]) -> list[Tensor]:
        """Run it; this may change `inputs` but no tensor of `captured`."""
        outputs: list[Tensor] = self.program.forward(*inputs, *captured)
        return outputs


def record_body(
    recording: Recording, function: Callable[[], list[Any]], inputs: list[Tensor]
) -> Body:
    """Call `function` once, and take its operations out of the trace's graph.

    Args:
        recording: Recording of the trace under way.
        function: The loop's or branch's body; returns a list of tensors.
        inputs: Tensors that the body uses and that are others in each run.

    Raises:
        Error: `function` returns something else than tensors of the device, or changes
            a tensor in place that isn't one of `inputs`.
    """
    before = dict(recording.nodes)
    starts = [before[id(tensor)] for tensor in inputs]
    outside = [t for t in recording.tensors() if all(t is not i for i in inputs)]
    versions = [tensor._version for tensor in outside]
    num_nodes = len(recording.graph.nodes)
    outputs = function()
    _check_outputs(recording, outputs)
    if any(t._version != version for t, version in zip(outside, versions)):
        raise createPoptorchError(
            "The body of poptorch.for_loop or poptorch.cond changes a tensor in place "
            "that is not one of its inputs: on the device it has a copy, and the "
            "change would be lost. Make it an input, and return it."
        )
    after = recording.nodes
    cut = list(recording.graph.nodes)[num_nodes:]
    graph, captured = _subgraph(cut, starts, [after[id(t)] for t in outputs])
    program = GraphModule(recording.root, graph)
    for node in reversed(cut):
        recording.graph.erase_node(node)
    recording.rebind(before)
    tensor_of = {
        before[id(t)]: t for t in reversed(recording.tensors()) if id(t) in before
    }
    return Body(program, [tensor_of[node] for node in captured], outputs)


def _check_outputs(recording: Recording, outputs: list[Any]) -> None:
    for output in outputs:
        if not isinstance(output, Tensor):
            raise createPoptorchError(
                "The body of poptorch.for_loop or poptorch.cond must return tensors. "
                f"Got {type(output).__name__}."
            )
        if not recording.is_on_device(output):
            raise host_tensor_among("return", output)


def _subgraph(
    nodes: list[Node], inputs: list[Node], results: list[Node]
) -> tuple[Graph, list[Node]]:
    """A graph of copies of `nodes`, and what it takes besides `inputs`."""
    inside = {*nodes, *inputs}
    used = [source for node in nodes for source in node.all_input_nodes]
    captured = list(dict.fromkeys(n for n in [*used, *results] if n not in inside))
    graph = Graph()
    copy_of = {
        node: graph.placeholder(f"argument_{index}")
        for index, node in enumerate([*inputs, *captured])
    }
    for node in nodes:
        copy_of[node] = graph.node_copy(node, copy_of.__getitem__)
    outputs = [copy_of[node] for node in results]
    erase_dead(graph, outputs)
    graph.output(outputs)
    return graph, captured
