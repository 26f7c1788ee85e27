# SPDX-License-Identifier: Apache-2.0
"""Part a program in operations that are folded and those that run apart.

The operations that a rule folds run once for several micro-batches. The rest runs for
each micro-batch by itself, in the program's order, as it would without folding. What
the rest takes from the folded part is cut into micro-batches.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, Sequence

import torch
from torch import Tensor
from torch.fx.node import Node, map_arg

from ipufit.emulator._folding.example_run import NodeRecord, run_example
from ipufit.emulator._folding.rules import fold_operation
from ipufit.emulator._folding.values import (
    SHARED,
    FoldedGraph,
    NotFolded,
    Operation,
    Value,
    joined,
)
from ipufit.emulator._program.program import Program
from ipufit.emulator._tracing.nodes import function_name
from ipufit.emulator._tracing.operation import map_tensors, tensors_in

_LEAST_SHARE = 0.5


class Split:
    """The two parts of a program, and how each of its nodes behaves.

    Args:
        arguments: The program's weights, then the rows of some micro-batch.

    Attributes:
        records: How each node behaves, and its results without their data.
        written: The memory that any node writes to.
        folded: The nodes that are folded.
        forced: The nodes that must run apart, whatever their rules say.
        bytes_per_micro_batch: The size of the values of one micro-batch: with a loss
            of all of them, for the backward pass needs them; else the most at one time.
        pays: Whether most of the computing operations are folded.
        rounds: Whether float16 is folded, whose values differ by its steps at times.
    """

    def __init__(self, program: Program, arguments: Sequence[Tensor]) -> None:
        self.program = program
        changed = program.updated_weights | program.volatile_weights
        names = enumerate(program.weight_names)
        records = run_example(
            program.graph,
            arguments,
            is_grad_enabled=program.has_loss,
            unchanged={index for index, name in names if name not in changed},
        )
        self.bytes_per_micro_batch = _bytes(records, is_kept=program.has_loss)
        self.records = {
            node: replace(record, value=map_tensors(record.value, _without_memory))
            for node, record in records.items()
        }
        self.written = frozenset().union(*(r.written for r in records.values()))
        self.forced = self._never_folded()
        self.folded = self._settle()
        self.rounds = any(_has_half(self.records[node].value) for node in self.folded)
        folded = sum(self._counts(node) for node in self.folded)
        total = sum(self._counts(node) for node in self.records)
        self.pays = folded > 0 and folded >= _LEAST_SHARE * total

    def _counts(self, node: Node) -> bool:
        return is_operation(node) and self.records[node].new_bytes > 0

    def _never_folded(self) -> set[Node]:
        weights = self.program.updated_weights | self.program.volatile_weights
        nodes = [n for n in self.records if n.op == "placeholder"]
        changing: set[int] = set()
        for node, name in zip(nodes, self.program.weight_names):
            if name in weights:
                changing |= self.records[node].touched
        return {
            node
            for node, record in self.records.items()
            if record.is_random
            or record.touched & changing
            or (self.program.has_loss and _has_half(record.value))
        }

    def _settle(self) -> set[Node]:
        """Fold what can be, so that memory that is written to is on one side only."""
        while True:
            values = fold(self, 2).values
            folded = set(values)
            torn = self._torn(folded) | self._unpicked(values)
            if not torn:
                return folded
            self.forced |= torn

    def _torn(self, folded: set[Node]) -> set[Node]:
        """Folded nodes whose memory is written to by nodes of both sides."""
        order = {node: index for index, node in enumerate(self.records)}
        torn: set[Node] = set()
        for memory in self.written:
            users = [n for n, r in self.records.items() if memory in r.touched]
            last = max(order[n] for n in users if memory in self.records[n].written)
            early = {n for n in users if order[n] <= last}
            if early & folded and not early <= folded:
                torn |= set(users) & folded
        return torn

    def _unpicked(self, values: dict[Node, Any]) -> set[Node]:
        """Folded nodes of several results that the rest wants to pick from."""
        return {
            node
            for node, value in values.items()
            if not isinstance(value, Value)
            and any(user not in values for user in node.users)
        }


def is_operation(node: Node) -> bool:
    """Whether a node is the call of a function or a method."""
    return node.op in ("call_function", "call_method")


def _without_memory(tensor: Tensor) -> Tensor:
    copy: Tensor = tensor.to("meta")
    return copy


def _bytes(records: dict[Node, NodeRecord], *, is_kept: bool) -> int:
    """The size of all values of a micro-batch, or the most at one time."""
    if is_kept:
        return sum(record.new_bytes for record in records.values())
    last_use: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for index, (node, record) in enumerate(records.items()):
        last_use.update(dict.fromkeys(record.touched, index))
        if node.op not in ("placeholder", "get_attr"):
            for tensor in tensors_in(record.value):
                storage = tensor.untyped_storage()
                sizes.setdefault(storage.data_ptr(), storage.nbytes())
    most = 0
    alive: dict[int, int] = {}
    for index, (node, record) in enumerate(records.items()):
        if node.op in ("placeholder", "get_attr"):
            continue
        most = max(most, sum(alive.values()) + record.new_bytes)
        alive.update({m: sizes[m] for m in record.touched if m in sizes})
        alive = {m: size for m, size in alive.items() if last_use[m] > index}
    return most


def _is_one_view(op: Operation, nodes: Sequence[Node]) -> bool:
    """Whether the nodes of a folded operation are one view, and none is a copy."""
    calls = [node for node in nodes if node.target is not operator.getitem]
    is_certain = op.name not in _VIEWS_OR_COPIES
    return is_certain and len(calls) <= 1


def _has_half(value: Any) -> bool:
    return any(tensor.dtype == torch.float16 for tensor in tensors_in(value))


def _touches_half(node: Node, records: dict[Node, NodeRecord]) -> bool:
    nodes = (node, *node.all_input_nodes)
    return any(_has_half(records[each].value) for each in nodes)


def _rounds_once(node: Node, added: Sequence[Node]) -> bool:
    """Whether a folded operation rounds its result as the operation itself does.

    It is the operation, between others that only move values.
    """
    calls = [each for each in added if each.target not in _MOVES_VALUES]
    return len(calls) <= 1 and all(each.target == node.target for each in calls)


_MOVES_VALUES = frozenset(
    """
    __getitem__ expand movedim permute repeat reshape squeeze to unsqueeze
    """.split()  # noqa: SIM905 - one per line would be longer
).union([operator.getitem, torch.cat, torch.stack])
"""Methods and functions that rules add, and that compute nothing."""

_VIEWS_OR_COPIES = frozenset({"contiguous", "to", "type_as", "float", "expand_as"})


def fold(split: Split, count: int) -> FoldedGraph:
    """Fold what can be folded of a program, for `count` micro-batches.

    The graph has no output yet.
    """
    program = split.program
    folded = FoldedGraph(count, is_grad_enabled=program.has_loss)
    values = folded.values
    num_weights = len(program.weight_names)
    placeholders = 0
    for node, record in split.records.items():
        if node.op == "placeholder":
            packing = SHARED if placeholders < num_weights else joined(0)
            placeholders += 1
            copy = folded.graph.placeholder(str(node.target))
            if node not in split.forced:
                values[node] = Value(copy, packing, record.value)
            continue
        if node.op == "get_attr":
            if isinstance(record.value, Tensor) and node not in split.forced:
                copy = folded.graph.get_attr(str(node.target))
                values[node] = Value(copy, SHARED, record.value)
            continue
        if node in split.forced or any(n not in values for n in node.all_input_nodes):
            continue
        folded.grad_mode(record.is_grad_enabled)
        mark = folded.mark()
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        op = Operation(
            folded,
            node,
            function_name(node),
            args,
            kwargs,
            record.value,
            writes=bool(record.written),
            is_view=bool(record.passed_on & split.written),
        )
        try:
            values[node] = fold_operation(op)
            if op.is_view and not op.writes:
                op.require(_is_one_view(op, list(folded.graph.nodes)[mark:]))
            if _touches_half(node, split.records):
                op.require(_rounds_once(node, list(folded.graph.nodes)[mark:]))
        except NotFolded:
            values.pop(node, None)
            folded.back_to(mark)
    return folded
