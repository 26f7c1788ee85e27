# SPDX-License-Identifier: Apache-2.0
"""Values of several micro-batches in one tensor, and the graph that computes them.

Where one micro-batch has a value `v`, a folded program has one tensor for the values
`v[0]` to `v[k - 1]` of k micro-batches. The *packing* of a value says how.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, Callable, NoReturn, Sequence

from torch import Tensor
from torch._C import _set_grad_enabled
from torch.fx.graph import Graph
from torch.fx.node import Node, map_aggregate


class NotFolded(Exception):
    """An operation has no folded form here: it runs once for each micro-batch."""


@dataclass(frozen=True)
class Packing:
    """The way in which several micro-batches' values are packed into one tensor.

    Attributes:
        kind: `"shared"`: all have the same value, which is there once; `"joined"`:
            they are concatenated along `dim`; `"stacked"`: along a new dimension, 0.
        dim: Not negative; 0 unless they are joined.

    Example:
        >>> joined(1).is_joined, SHARED.is_joined
        (True, False)
    """

    kind: str
    dim: int = 0

    @property
    def is_joined(self) -> bool:
        """Whether the values are concatenated along a dimension of theirs."""
        return self.kind == "joined"


SHARED = Packing("shared")
STACKED = Packing("stacked")


def joined(dim: int) -> Packing:
    """Values that are concatenated along `dim`."""
    return Packing("joined", dim)


@dataclass(frozen=True)
class Value:
    """A tensor of a folded program, for one tensor of the program.

    Attributes:
        node: The node of the folded graph that computes it.
        example: The tensor of some micro-batch, without its data.
    """

    node: Node
    packing: Packing
    example: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of one micro-batch's value."""
        return tuple(self.example.shape)

    @property
    def rank(self) -> int:
        """The number of dimensions of one micro-batch's value."""
        return len(self.shape)


def values_in(structure: Any) -> list[Value]:
    """List the values in nested arguments."""
    found: list[Value] = []
    map_values(structure, found.append)
    return found


def map_values(structure: Any, function: Callable[[Value], Any]) -> Any:
    """Replace the values in nested arguments."""
    return map_aggregate(
        structure, lambda leaf: function(leaf) if isinstance(leaf, Value) else leaf
    )


class FoldedGraph:
    """A graph under construction that computes k micro-batches at once.

    Args:
        count: The number of micro-batches, k.
        is_grad_enabled: Whether gradients are recorded where the graph begins.

    Attributes:
        values: For each folded node of the program its value, or a tuple of values.
    """

    def __init__(self, count: int, *, is_grad_enabled: bool) -> None:
        self.count = count
        self.graph = Graph()
        self.values: dict[Node, Any] = {}
        self._is_grad_enabled = is_grad_enabled

    def grad_mode(self, is_enabled: bool) -> None:
        """Record gradients from here on, or stop it."""
        if is_enabled != self._is_grad_enabled:
            self.graph.call_function(_set_grad_enabled, (is_enabled,))
            self._is_grad_enabled = is_enabled

    def function(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Add the call of a function."""
        node: Node = self.graph.call_function(target, args, kwargs)
        return node

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        """Add the call of a method of the first argument."""
        node: Node = self.graph.call_method(name, args, kwargs)
        return node

    def mark(self) -> int:
        """The number of nodes so far, to go back to."""
        return len(self.graph.nodes)

    def back_to(self, mark: int) -> None:
        """Remove the nodes that were added since `mark`."""
        for node in reversed(list(self.graph.nodes)[mark:]):
            self.graph.erase_node(node)

    # Other packings -------------------------------------------------------------

    def stacked(self, value: Value, rank: int | None = None) -> Node:
        """Stack the values along a new dimension 0.

        Args:
            value: A value of any packing.
            rank: Add dimensions of size 1 in front of those of one value, up to this
                many.
        """
        node, shape = value.node, value.shape
        if value.packing == SHARED:
            node = self.method("expand", node, (self.count, *shape))
        elif value.packing.is_joined:
            dim = value.packing.dim
            sizes = (*shape[:dim], self.count, *shape[dim:])
            node = self.method("reshape", node, sizes)
            if dim:
                node = self.method("movedim", node, dim, 0)
        if rank is not None and rank > len(shape):
            fill = (1,) * (rank - len(shape))
            node = self.method("reshape", node, (self.count, *fill, *shape))
        return node

    def joined(self, value: Value, dim: int) -> Node:
        """Concatenate the values along `dim`, a dimension that they have."""
        if value.rank <= dim:
            raise NotFolded
        if value.packing == joined(dim):
            return value.node
        if value.packing == SHARED:
            times = [1] * value.rank
            times[dim] = self.count
            return self.method("repeat", value.node, tuple(times))
        node = self.stacked(value)
        if dim:
            node = self.method("movedim", node, 0, dim)
        sizes = list(value.shape)
        sizes[dim] *= self.count
        return self.method("reshape", node, tuple(sizes))

    def flat(self, value: Value) -> Node:
        """Put the elements of each micro-batch in a row: `[k, elements]`."""
        is_flat = value.packing == joined(0)
        node = value.node if is_flat else self.stacked(value)
        return self.method("reshape", node, (self.count, value.example.numel()))


@dataclass
class Operation:
    """One operation of a program, to be folded.

    Attributes:
        folded: The graph that the folded operation is added to.
        node: Its node in the program's graph.
        name: The name of the function or method.
        args: Its arguments, with values for tensors.
        kwargs: Its arguments by name, with values for tensors.
        example: Its result for some micro-batch.
        writes: Whether it changes one of its arguments.
        is_view: Whether its results are views of memory that is written to somewhere:
            the folded ones must be views too.
        values: The values among its arguments.
    """

    folded: FoldedGraph
    node: Node
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    example: Any
    writes: bool
    is_view: bool = False
    values: list[Value] = field(init=False)

    def __post_init__(self) -> None:
        self.values = values_in((self.args, self.kwargs))

    @property
    def count(self) -> int:
        """The number of micro-batches that are folded."""
        return self.folded.count

    @property
    def is_method(self) -> bool:
        """Whether it is the call of a method."""
        return self.node.op == "call_method"

    @property
    def is_shared(self) -> bool:
        """Whether all micro-batches give it the same tensors."""
        return all(value.packing == SHARED for value in self.values)

    def refuse(self) -> NoReturn:
        """Leave the operation to the micro-batches.

        Raises:
            NotFolded: Always.
        """
        raise NotFolded(self.name)

    def require(self, is_fine: bool) -> None:
        """Refuse unless a condition holds."""
        if not is_fine:
            self.refuse()

    def require_rest_shared(self, *own: Value) -> None:
        """Refuse unless all values but these are the same for all micro-batches."""
        own_ids = set(map(id, own))
        self.require(
            all(v.packing == SHARED for v in self.values if id(v) not in own_ids)
        )

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """Give an argument by its position or its name."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if len(self.args) > position else default

    def value(self, position: int, name: str) -> Value:
        """Give an argument that must be a tensor; refuse if it isn't."""
        found = self.get(position, name)
        if not isinstance(found, Value):
            self.refuse()
        return found

    def emit(
        self, args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> Node:
        """Add the operation to the folded graph, with other arguments if given."""
        args = self.args if args is None else args
        kwargs = self.kwargs if kwargs is None else kwargs
        node: Node = self.folded.graph.create_node(
            self.node.op,
            self.node.target,
            tuple(map_values(tuple(args), _node_of)),
            map_values(dict(kwargs), _node_of),
        )
        node.meta["operator"] = self.node.meta.get("operator")
        return node

    def emit_with(self, *replaced: tuple[int, str, Any]) -> Node:
        """Add the operation with some arguments replaced.

        Args:
            replaced: Position, name, and the new argument of each.
        """
        args, kwargs = list(self.args), dict(self.kwargs)
        for position, name, new in replaced:
            if name in kwargs or len(args) <= position:
                kwargs[name] = new
            else:
                args[position] = new
        return self.emit(args, kwargs)

    def unchanged(self, packing: Packing) -> Any:
        """Fold the operation as it is; its results are packed so."""
        return self.result(self.emit(), packing)

    def of_joined(self, value: Value, dim: int = 0) -> Any:
        """Fold the operation with its input joined along `dim`, as its results are."""
        node = self.emit_with((0, "input", self.folded.joined(value, dim)))
        return self.result(node, joined(dim))

    def of_stacked(self, value: Value) -> Any:
        """Fold the operation with its input stacked, as its results are."""
        node = self.emit_with((0, "input", self.folded.stacked(value)))
        return self.result(node, STACKED)

    def result(self, node: Node, packings: Packing | Sequence[Packing]) -> Any:
        """The value of the operation, or its values if it returns several."""

        def packing_of(index: int) -> Packing:
            return packings if isinstance(packings, Packing) else packings[index]

        if isinstance(self.example, Tensor):
            return Value(node, packing_of(0), self.example)
        self.require(isinstance(self.example, (tuple, list)))
        results: list[Value | None] = []
        for index, example in enumerate(self.example):
            if example is None:
                results.append(None)
                continue
            self.require(isinstance(example, Tensor))
            item = self.folded.function(operator.getitem, node, index)
            results.append(Value(item, packing_of(index), example))
        return tuple(results)


def _node_of(value: Value) -> Node:
    return value.node


def promotes_alike(values: Sequence[Value]) -> bool:
    """Whether torch gives the same type if those without dimensions get one.

    Tensors without dimensions don't decide on the type of a result, stacked ones do.
    """
    bare = {value.example.dtype for value in values if value.rank == 0}
    other = {value.example.dtype for value in values if value.rank}
    return all(
        one == two or one.is_floating_point != two.is_floating_point
        for one in bare
        for two in other
    )
