# SPDX-License-Identifier: Apache-2.0
"""Run the folded part of a program once, and the rest for each micro-batch."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor
from torch._C import _set_grad_enabled
from torch.fx.graph import Graph
from torch.fx.graph_module import GraphModule
from torch.fx.node import Node

from ipufit.emulator._folding.split import Split, fold, is_operation
from ipufit.emulator._folding.values import SHARED, STACKED, FoldedGraph, Value

Rows = Tuple[Tensor, ...]
Results = Tuple[Tensor, ...]


class FoldResults(NamedTuple):
    """The results of a fold.

    Attributes:
        results: One tuple for each micro-batch.
        loss: The losses of all micro-batches in one tensor; None for inference.
    """

    results: list[Results]
    loss: Tensor | None


class Fold:
    """A program that computes several micro-batches at once.

    Args:
        count: Number of micro-batches.

    Attributes:
        is_uncut: Whether all results are rows that needn't be cut: in inference, with
            nothing that runs apart.
    """

    def __init__(self, split: Split, count: int) -> None:
        program = split.program
        self.count = count
        self._has_loss = program.has_loss
        folded = fold(split, count)
        rest = [
            node
            for node in split.records
            if is_operation(node) and node not in folded.values
        ]
        *_, output = program.graph.graph.nodes
        results = list(output.args[0])
        self._is_folded = [node in folded.values for node in results]
        needed = [n for node in rest for n in node.all_input_nodes]
        apart = [node for node in results if node not in folded.values]
        cut = [
            node
            for node in dict.fromkeys([*needed, *apart])
            if node in folded.values and node.op not in ("placeholder", "get_attr")
        ]
        self._num_cut = len(cut)
        self.is_uncut = not (rest or self._has_loss) and all(
            isinstance(value := folded.values.get(node), Value)
            and value.packing not in (SHARED, STACKED)
            and value.packing.dim == 0
            for node in results
        )
        self._finish(folded, cut, results)
        whole = program.laid_out(GraphModule(program.graph, folded.graph))
        self._folded: Callable[..., Results] = whole.forward
        self._rest: Callable[..., Results] | None = None
        if rest or not all(self._is_folded):
            graph = _rest_graph(split, rest, cut, apart)
            module = GraphModule(program.graph, graph)
            self._rest = program.laid_out(module).forward

    @property
    def has_rest(self) -> bool:
        """Whether some of the program runs for each micro-batch by itself."""
        return self._rest is not None

    def _finish(
        self, folded: FoldedGraph, cut: list[Node], results: list[Node]
    ) -> None:
        """Let the folded graph return what the rest takes, the results, the loss."""
        folded.grad_mode(self._has_loss)
        outputs: list[Node] = [self._parts(folded, node) for node in cut]
        plain = results[:-1] if self._has_loss else results
        for node in plain:
            if self.is_uncut:
                outputs.append(folded.values[node].node)
            elif node in folded.values:
                outputs.append(self._parts(folded, node, is_result=True))
        if self._has_loss and results[-1] in folded.values:
            loss: Value = folded.values[results[-1]]
            is_shared = loss.packing == SHARED
            outputs.append(folded.stacked(loss) if is_shared else loss.node)
        folded.graph.output(tuple(outputs))

    def _parts(
        self, folded: FoldedGraph, node: Node, *, is_result: bool = False
    ) -> Node:
        """Cut a value into micro-batches."""
        value: Value = folded.values[node]
        source = value.node
        if is_result and self._has_loss:
            source = folded.method("detach", source)
        if value.packing == SHARED:
            return folded.function(_same, source, self.count)
        if value.packing == STACKED:
            return folded.method("unbind", source, 0)
        dim = value.packing.dim
        return folded.method("split", source, value.shape[dim], dim)

    def run_whole(self, arguments: list[Tensor], joined: Rows) -> Results:
        """Run a fold whose results are uncut, and leave the rows together."""
        return self._folded(*arguments, *joined)

    def run(
        self,
        arguments: list[Tensor],
        joined: Rows,
        apart: Sequence[Sequence[Tensor]],
    ) -> FoldResults:
        """Run it, in the grad mode that the program starts in.

        Args:
            arguments: The program's weights.
            joined: The rows of all micro-batches.
            apart: The weights and rows of each micro-batch, if the fold has a rest.
        """
        parts: list[Sequence[Tensor]] = list(self._folded(*arguments, *joined))
        if self.is_uncut:
            whole: list[Any] = parts
            parts = [result.split(len(result) // self.count) for result in whole]
        cut, parts = parts[: self._num_cut], parts[self._num_cut :]
        of_rest: list[Sequence[Tensor]] = []
        if self._rest is not None:
            ran = [
                self._rest(*own, *(values[index] for values in cut))
                for index, own in enumerate(apart)
            ]
            of_rest = list(zip(*ran))
        columns_folded, columns_rest = iter(parts), iter(of_rest)
        columns = [
            next(columns_folded if is_folded else columns_rest)
            for is_folded in self._is_folded
        ]
        loss: Tensor | None = None
        if self._has_loss:
            losses = columns.pop()
            is_one = isinstance(losses, Tensor)
            loss = losses if is_one else torch.stack(list(losses))  # type: ignore[assignment]
        results = list(zip(*columns)) if columns else [()] * self.count
        return FoldResults(results, loss)


def _same(tensor: Tensor, count: int) -> list[Tensor]:
    return [tensor] * count


def _rest_graph(
    split: Split, nodes: list[Node], cut: list[Node], results: list[Node]
) -> Graph:
    """Make a graph of what runs for each micro-batch.

    It takes what the program takes, then the folded nodes `cut`, of which it gets one
    micro-batch's part; it runs `nodes` and returns `results`.
    """
    graph: Graph = Graph()
    copies: dict[Node, Node] = {}
    for node in split.records:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(str(node.target))
    for index, node in enumerate(cut):
        copies[node] = graph.placeholder(f"folded_{index}")
    mode = split.program.has_loss
    for node in split.records:
        if node.op == "get_attr":
            copies[node] = graph.get_attr(str(node.target))
    for node in nodes:
        if split.records[node].is_grad_enabled != mode:
            mode = not mode
            graph.call_function(_set_grad_enabled, (mode,))
        copies[node] = graph.node_copy(node, copies.__getitem__)
    if mode != split.program.has_loss:
        graph.call_function(_set_grad_enabled, (not mode,))
    graph.output(tuple(copies[node] for node in results))
    return graph
