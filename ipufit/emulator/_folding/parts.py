# SPDX-License-Identifier: Apache-2.0
"""Part a training program in what every update needs, and what can run for many.

What a micro-batch counts, such as its samples and hits, has no effect on weights. It
takes as long as the forward pass of a small network, nearly all of it in calls of
operations on a few numbers. So those that are exact (`exactness`) run once for all
micro-batches of a call, whose updates come one after the other all the same:

- *early*, of the inputs alone, before the first update: single numbers that the loss
  takes, such as a number of samples;
- *late*, after the last update, of what the rest has left: `cuts`;
- the *core* is the rest, and runs for each micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Callable, Iterable, Tuple

from torch import Tensor
from torch._C import _set_grad_enabled
from torch.fx.graph import Graph
from torch.fx.graph_module import GraphModule
from torch.fx.node import Node, map_arg

from ipufit.emulator._folding.exactness import exact_nodes, is_of_one_element
from ipufit.emulator._folding.example_run import NodeRecord, run_example
from ipufit.emulator._folding.rules import fold_operation
from ipufit.emulator._folding.split import is_operation
from ipufit.emulator._folding.values import (
    STACKED,
    FoldedGraph,
    NotFolded,
    Operation,
    Value,
    joined,
)
from ipufit.emulator._program.direct_calls import make_direct
from ipufit.emulator._program.program import Program
from ipufit.emulator._tracing.constant_nodes import function_name
from ipufit.emulator._tracing.operands import map_tensors, tensors_in

Function = Callable[..., Tuple[Tensor, ...]]


class Parts:
    """The three parts of a training program.

    Args:
        program: A program with a loss, none of whose operations must run apart.
        arguments: The program's weights, then the rows of some micro-batch.

    Attributes:
        cuts: The nodes whose values the core returns before its own results.
        early: The nodes whose values the core takes after the rows.
        ranks: For each result of the program but the loss its number of dimensions if
            it is late; None if the core returns it.
        num_saved: The number of operations that the core has less than the program.
    """

    def __init__(self, program: Program, arguments: list[Tensor]) -> None:
        self._root = program.laid_out(program.graph)
        self._nodes = nodes = _Nodes.of(program, self._root, arguments)
        usable = nodes.usable(exact_nodes(nodes.records))
        while True:
            roles = _Roles.of(nodes, usable)
            unfolded = self._unfolded(roles)
            if unfolded is None:
                break
            usable = nodes.usable(usable - {unfolded})
        self._roles = roles
        self.cuts = roles.cuts
        self.early = roles.early
        self.ranks = [
            nodes.records[node].value.dim() if node in roles.late else None
            for node in nodes.results
        ]
        operations = sum(map(is_operation, nodes.records))
        self.num_saved = operations - len(roles.core)

    @property
    def kept_bytes(self) -> int:
        """The size of what is kept of a micro-batch until the late part runs."""
        return _num_bytes(self._nodes.records, [*self.cuts, *self._nodes.results])

    @property
    def early_bytes(self) -> int:
        """The size of what the early part computes for one micro-batch."""
        return _num_bytes(self._nodes.records, self._roles.before)

    @cached_property
    def core(self) -> Function:
        """The core: of the weights, the rows, and one micro-batch's early values.

        It returns the cuts, those results that aren't late, and the loss.
        """
        nodes, roles = self._nodes, self._roles
        late = roles.late
        outputs = [*self.cuts, *(n for n in nodes.results if n not in late), nodes.loss]
        placeholders = [*nodes.weights, *nodes.rows, *self.early]
        graph = _copied(nodes, placeholders, roles.core, outputs, True)
        make_direct(graph)
        return self._module(graph)

    def run_early(self, count: int) -> Function:
        """The early part: of the rows of so many micro-batches.

        For each node of `early` it gives a tensor with one number for each.
        """
        folded = self._fold(self._roles.before, [], count)
        values = [folded.values[node] for node in self.early]
        folded.graph.output(tuple(folded.stacked(value) for value in values))
        return self._module(folded.graph)

    def run_late(self, count: int) -> Function:
        """The late part: of the rows of so many micro-batches, and their cuts, stacked.

        It gives the late results: joined, or stacked if they have no dimension.
        """
        folded = self._fold(self._roles.after, self.cuts, count)
        values = [folded.values[node] for node in self._late_results]
        folded.graph.output(
            tuple(folded.joined(v, 0) if v.rank else folded.stacked(v) for v in values)
        )
        return self._module(folded.graph)

    @cached_property
    def early_of_one(self) -> Function:
        """The early part of one micro-batch, as the program has it."""
        nodes, roles = self._nodes, self._roles
        return self._module(_copied(nodes, nodes.rows, roles.before, self.early, False))

    @cached_property
    def late_of_one(self) -> Function:
        """The late part of one micro-batch, as the program has it."""
        nodes, roles = self._nodes, self._roles
        given = [*nodes.rows, *self.cuts]
        return self._module(
            _copied(nodes, given, roles.after, self._late_results, False)
        )

    @property
    def _late_results(self) -> list[Node]:
        return [node for node in self._nodes.results if node in self._roles.late]

    def _module(self, graph: Graph) -> Function:
        forward: Function = GraphModule(self._root, graph).forward
        return forward

    def _fold(self, run: list[Node], cuts: list[Node], count: int) -> FoldedGraph:
        folded = FoldedGraph(count, is_grad_enabled=False)
        records = self._nodes.records
        for node in self._nodes.rows:
            copy = folded.graph.placeholder(str(node.target))
            folded.values[node] = Value(copy, joined(0), records[node].value)
        for index, node in enumerate(cuts):
            copy = folded.graph.placeholder(f"cut_{index}")
            folded.values[node] = Value(copy, STACKED, records[node].value)
        alike: dict[str, Node] = {}
        for node in run:
            operands = map_arg((node.args, node.kwargs), folded.values.__getitem__)
            twin = alike.setdefault(f"{node.target} {operands}", node)
            if twin is not node:
                folded.values[node] = folded.values[twin]
            elif function_name(node) == "detach":  # no gradients are recorded
                folded.values[node] = folded.values[node.all_input_nodes[0]]
            else:
                folded.values[node] = _folded_operation(folded, node, records[node])
        return folded

    def _unfolded(self, roles: _Roles) -> Node | None:
        """An operation that no rule folds."""
        for run, cuts in ((roles.before, []), (roles.after, roles.cuts)):
            try:
                self._fold(run, cuts, 2)
            except _Unfolded as error:
                return error.node
        return None


class _Unfolded(Exception):
    """No rule folds an operation."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.name)
        self.node = node


def _folded_operation(folded: FoldedGraph, node: Node, record: NodeRecord) -> object:
    args, kwargs = map_arg((node.args, node.kwargs), folded.values.__getitem__)
    name = function_name(node)
    try:
        return fold_operation(
            Operation(folded, node, name, args, kwargs, record.value, writes=False)
        )
    except NotFolded:
        raise _Unfolded(node) from None


@dataclass(frozen=True)
class _Nodes:
    """The nodes of a program, and how they depend on each other.

    Attributes:
        records: How each behaves, and its results without their data.
        weights: The placeholders of the weights.
        rows: The placeholders of the inputs.
        results: The nodes that the program returns, without the loss.
        loss: The node of the loss, before `identity_loss` adds up its one element.
        own: The nodes whose tensors keep their values until the end of a call: they
            are neither weights nor views of these, and nothing is written to them.
    """

    records: dict[Node, NodeRecord]
    weights: list[Node]
    rows: list[Node]
    results: list[Node]
    loss: Node
    own: set[Node]

    @classmethod
    def of(
        cls, program: Program, graph: GraphModule, arguments: list[Tensor]
    ) -> _Nodes:
        records = run_example(graph, arguments, is_grad_enabled=True)
        *_, output = graph.graph.nodes
        *results, loss = output.args[0]
        if is_of_one_element(loss, records):
            loss = loss.all_input_nodes[0]
        inputs = [node for node in records if node.op == "placeholder"]
        weights = inputs[: len(program.weight_names)]
        changing = frozenset().union(
            *(records[node].touched for node in weights),
            *(record.written for record in records.values()),
        )
        own = {node for node, r in records.items() if not r.results & changing}
        plain = {
            node: replace(record, value=map_tensors(record.value, _without_memory))
            for node, record in records.items()
        }
        rows = inputs[len(weights) :]
        return cls(plain, weights, rows, results, loss, own)

    def usable(self, exact: set[Node]) -> set[Node]:
        """The exact operations whose operands keep their values."""
        found: set[Node] = set()
        for node in self.records:
            is_kept = node in exact and node in self.own
            operands = node.all_input_nodes
            if is_kept and all(n in found or self._is_operand(n) for n in operands):
                found.add(node)
        return found

    def _is_operand(self, node: Node) -> bool:
        is_tensor = isinstance(self.records[node].value, Tensor)
        return is_tensor and node in self.own and node.op != "get_attr"

    def above(self, nodes: Iterable[Node], stops: set[Node]) -> set[Node]:
        """Nodes, and those that they need, up to where it stops."""
        found: set[Node] = set()
        left = list(nodes)
        while left:
            node = left.pop()
            if node not in found and node not in stops:
                found.add(node)
                left.extend(node.all_input_nodes)
        return found

    def ordered(self, nodes: set[Node]) -> list[Node]:
        """Operations in the order of the program."""
        return [node for node in self.records if node in nodes and is_operation(node)]


@dataclass(frozen=True)
class _Roles:
    """Which operation runs when, in the order of the program.

    Attributes:
        late: Operations that no update needs.
        before: Operations that run early.
        early: Operations of `before` whose values the core takes.
        core: Operations that run for each micro-batch.
        cuts: Operations of the core whose values the late part takes.
        after: Operations that run late: `late`, and those of the inputs alone that
            these need.
    """

    late: set[Node]
    before: list[Node]
    early: list[Node]
    core: list[Node]
    cuts: list[Node]
    after: list[Node]

    @classmethod
    def of(cls, nodes: _Nodes, usable: set[Node]) -> _Roles:
        needed = nodes.above([nodes.loss], set())
        late: set[Node] = set()
        for node in reversed(list(nodes.records)):
            users = [user for user in node.users if user.op != "output"]
            if node in usable and node not in needed and late.issuperset(users):
                late.add(node)
        free: set[Node] = set()
        for node in nodes.records:
            if node in usable and free.union(nodes.rows).issuperset(
                node.all_input_nodes
            ):
                free.add(node)
        results = [node for node in nodes.results if node in late]
        others = nodes.records.keys() - late - free
        after = nodes.ordered(nodes.above(results, others))
        given = {n for node in after for n in node.all_input_nodes}
        cuts = nodes.ordered(given - set(after))
        fixed = {n for n in nodes.records if is_operation(n)} - late - free
        returned = [n for n in nodes.results if n not in late]
        single = {n for n in free if _is_number(nodes.records[n].value)}
        single -= set(returned)
        kept = nodes.above([*fixed, *returned, nodes.loss], single)
        core = nodes.ordered(kept)
        taken = {n for node in core for n in node.all_input_nodes} & single
        early = nodes.ordered(taken)
        before = nodes.ordered(nodes.above(early, set()))
        return cls(late, before, early, core, cuts, after)


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _without_memory(tensor: Tensor) -> Tensor:
    copy: Tensor = tensor.to("meta")
    return copy


def _num_bytes(records: dict[Node, NodeRecord], nodes: Iterable[Node]) -> int:
    tensors = [t for node in nodes for t in tensors_in(records[node].value)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _copied(
    nodes: _Nodes,
    placeholders: list[Node],
    run: list[Node],
    outputs: list[Node],
    is_grad_enabled: bool,
) -> Graph:
    """Make a graph of some of a program's operations, as they are."""
    graph: Graph = Graph()
    copies: dict[Node, Node] = {
        node: graph.placeholder(f"given_{index}")
        for index, node in enumerate(placeholders)
    }
    for node in nodes.records:
        if node.op == "get_attr":
            copies[node] = graph.get_attr(str(node.target))
    mode = is_grad_enabled
    for node in run:
        if is_grad_enabled and nodes.records[node].is_grad_enabled != mode:
            mode = not mode
            graph.call_function(_set_grad_enabled, (mode,))
        copies[node] = graph.node_copy(node, copies.__getitem__)
    if mode != is_grad_enabled:
        graph.call_function(_set_grad_enabled, (is_grad_enabled,))
    graph.output(tuple(copies[node] for node in outputs))
    return graph
