# SPDX-License-Identifier: Apache-2.0
"""Which calls of a program are folded, and which run for each micro-batch.

A program is parted in two: the calls that a rule folds, and the rest, which runs for
each micro-batch by itself, in their order, as it would without folding. What the rest
takes from the folded part is cut into micro-batches.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, Sequence

import torch
from torch import Tensor
from torch.fx.node import Node, map_arg

from ipufit.emulator._folding.example_run import Seen, run_example
from ipufit.emulator._folding.rules import fold_call
from ipufit.emulator._folding.values import (
    SHARED,
    Call,
    FoldedGraph,
    NotFolded,
    Value,
    joined,
)
from ipufit.emulator._program.program import Program
from ipufit.emulator._tracing.constant_nodes import function_name
from ipufit.emulator._tracing.operands import map_tensors, tensors_in

_LEAST_SHARE = 0.5


class Split:
    """Which nodes of a program are folded, and what is known of them.

    Args:
        program: What runs.
        arguments: Its weights, then the rows of some micro-batch.

    Attributes:
        bytes_per_micro_batch: What the values of one micro-batch take: with a loss all
            of them, for the backward pass needs them; else the most at one time.
        pays: Whether most of the computing calls are folded.
    """

    def __init__(self, program: Program, arguments: Sequence[Tensor]) -> None:
        self.program = program
        seen = run_example(program.graph, arguments, is_grad_enabled=program.has_loss)
        self.bytes_per_micro_batch = _bytes(seen, is_kept=program.has_loss)
        self.seen = {
            node: replace(what, value=map_tensors(what.value, _without_memory))
            for node, what in seen.items()
        }
        self.written = frozenset().union(*(what.written for what in seen.values()))
        self._forced = self._never_folded()
        self._settle()
        folded = sum(self._counts(node) for node in self.folded)
        total = sum(self._counts(node) for node in self.seen)
        self.pays = folded > 0 and folded >= _LEAST_SHARE * total

    def _counts(self, node: Node) -> bool:
        is_call = node.op in ("call_function", "call_method")
        return is_call and self.seen[node].new_bytes > 0

    def _never_folded(self) -> set[Node]:
        weights = self.program.updated_weights | self.program.volatile_weights
        nodes = [n for n in self.seen if n.op == "placeholder"]
        changing: set[int] = set()
        for node, name in zip(nodes, self.program.weight_names):
            if name in weights:
                changing |= self.seen[node].touched
        return {
            node
            for node, seen in self.seen.items()
            if seen.is_random
            or seen.touched & changing
            or any(t.dtype == torch.float16 for t in tensors_in(seen.value))
        }

    def _settle(self) -> None:
        """Fold what can be; memory that is written to is on one side only."""
        while True:
            values = fold(self, 2).values
            self.folded = set(values)
            torn = self._torn() | self._unpicked(values)
            if not torn:
                return
            self._forced |= torn

    def _torn(self) -> set[Node]:
        order = {node: index for index, node in enumerate(self.seen)}
        torn: set[Node] = set()
        for memory in {m for seen in self.seen.values() for m in seen.written}:
            users = [n for n, seen in self.seen.items() if memory in seen.touched]
            last = max(order[n] for n in users if memory in self.seen[n].written)
            early = {n for n in users if order[n] <= last}
            if early & self.folded and not early <= self.folded:
                torn |= set(users) & self.folded
        return torn

    def _unpicked(self, values: dict[Node, Any]) -> set[Node]:
        """Folded calls of several results that the rest wants to pick from."""
        return {
            node
            for node, value in values.items()
            if not isinstance(value, Value)
            and any(user not in values for user in node.users)
        }

    def is_forced(self, node: Node) -> bool:
        """Whether a node must not be folded, whatever its rule says."""
        return node in self._forced


def _without_memory(tensor: Tensor) -> Tensor:
    copy: Tensor = tensor.to("meta")
    return copy


def _bytes(seen: dict[Node, Seen], *, is_kept: bool) -> int:
    """What the values of a micro-batch take: all of them, or the most at one time."""
    if is_kept:
        return sum(what.new_bytes for what in seen.values())
    last_use: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for index, (node, what) in enumerate(seen.items()):
        last_use.update(dict.fromkeys(what.touched, index))
        if node.op not in ("placeholder", "get_attr"):
            for tensor in tensors_in(what.value):
                storage = tensor.untyped_storage()
                sizes.setdefault(storage.data_ptr(), storage.nbytes())
    most = 0
    alive: dict[int, int] = {}
    for index, (node, what) in enumerate(seen.items()):
        if node.op in ("placeholder", "get_attr"):
            continue
        most = max(most, sum(alive.values()) + what.new_bytes)
        alive.update({m: sizes[m] for m in what.touched if m in sizes})
        alive = {m: size for m, size in alive.items() if last_use[m] > index}
    return most


def _is_one_view(call: Call, nodes: Sequence[Node]) -> bool:
    """Whether nodes are the same view as a call, and not of a copy."""
    calls = [node for node in nodes if node.target is not operator.getitem]
    is_certain = call.name not in _VIEWS_OR_COPIES
    return is_certain and len(calls) <= 1


_VIEWS_OR_COPIES = frozenset({"contiguous", "to", "type_as", "float", "expand_as"})


@dataclass
class Folded:
    """A folded graph under construction, and what it has for the program's nodes."""

    graph: FoldedGraph
    values: dict[Node, Any]


def fold(split: Split, count: int) -> Folded:
    """Fold what can be folded of a program.

    Args:
        split: Of the program.
        count: Micro-batches in one pass.

    Returns:
        The graph, without an output.
    """
    program = split.program
    folded = FoldedGraph(count, is_grad_enabled=program.has_loss)
    values: dict[Node, Any] = {}
    num_weights = len(program.weight_names)
    placeholders = 0
    for node, seen in split.seen.items():
        if node.op == "placeholder":
            place = SHARED if placeholders < num_weights else joined(0)
            placeholders += 1
            copy = folded.graph.placeholder(str(node.target))
            if not split.is_forced(node):
                values[node] = Value(copy, place, seen.value)
            continue
        if node.op == "get_attr":
            if isinstance(seen.value, Tensor) and not split.is_forced(node):
                copy = folded.graph.get_attr(str(node.target))
                values[node] = Value(copy, SHARED, seen.value)
            continue
        if split.is_forced(node) or any(n not in values for n in node.all_input_nodes):
            continue
        folded.grad_mode(seen.is_grad_enabled)
        mark = folded.mark()
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        call = Call(
            folded,
            node,
            function_name(node),
            args,
            kwargs,
            seen.value,
            writes=bool(seen.written),
            is_view=bool(seen.passed_on & split.written),
        )
        try:
            values[node] = fold_call(call)
            if call.is_view and not call.writes:
                call.require(_is_one_view(call, list(folded.graph.nodes)[mark:]))
        except NotFolded:
            values.pop(node, None)
            folded.back_to(mark)
    return Folded(folded, values)
