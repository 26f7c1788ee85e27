# SPDX-License-Identifier: Apache-2.0
"""Values of several micro-batches in one tensor, and the graph that computes them.

Where one micro-batch has a value `v`, a folded program has one tensor for the values
`v[0]` to `v[k - 1]` of k micro-batches. Its *place* says where they are in it.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, NoReturn, Sequence

from torch import Tensor
from torch._C import _set_grad_enabled
from torch.fx.graph import Graph
from torch.fx.node import Node


class NotFolded(Exception):
    """A call has no folded form here: it runs once for each micro-batch."""


@dataclass(frozen=True)
class Place:
    """Where the values of the micro-batches are in one tensor.

    Attributes:
        kind: `"shared"`: all have the same value, which is there once; `"joined"`:
            they are concatenated along `dim`; `"stacked"`: along a new dimension, 0.
        dim: Not negative.

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


SHARED = Place("shared")
STACKED = Place("stacked")


def joined(dim: int) -> Place:
    """The place of values that are concatenated along `dim`."""
    return Place("joined", dim)


@dataclass(frozen=True)
class Value:
    """What a folded program has for a tensor of the program.

    Attributes:
        node: Of the folded graph.
        place: Where each micro-batch's value is in it.
        example: The tensor in some micro-batch.
    """

    node: Node
    place: Place
    example: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one micro-batch's value."""
        return tuple(self.example.shape)

    @property
    def rank(self) -> int:
        """Its number of dimensions."""
        return len(self.shape)


def values_in(structure: Any) -> Iterator[Value]:
    """Yield the values in nested arguments."""
    if isinstance(structure, Value):
        yield structure
    elif isinstance(structure, (tuple, list)):
        for element in structure:
            yield from values_in(element)
    elif isinstance(structure, dict):
        for element in structure.values():
            yield from values_in(element)
    elif isinstance(structure, slice):
        yield from values_in((structure.start, structure.stop, structure.step))


def map_values(structure: Any, function: Callable[[Value], Any]) -> Any:
    """Replace the values in nested arguments."""
    if isinstance(structure, Value):
        return function(structure)
    if isinstance(structure, (tuple, list)):
        return type(structure)([map_values(element, function) for element in structure])
    if isinstance(structure, dict):
        return {key: map_values(v, function) for key, v in structure.items()}
    if isinstance(structure, slice):
        return slice(
            map_values(structure.start, function),
            map_values(structure.stop, function),
            map_values(structure.step, function),
        )
    return structure


class FoldedGraph:
    """A graph under construction that computes k micro-batches at once.

    Args:
        count: k.
        is_grad_enabled: Whether gradients are recorded where the graph begins.
    """

    def __init__(self, count: int, *, is_grad_enabled: bool) -> None:
        self.count = count
        self.graph = Graph()
        self._is_grad_enabled = is_grad_enabled

    def grad_mode(self, is_enabled: bool) -> None:
        """Record gradients from here on, or don't."""
        if is_enabled != self._is_grad_enabled:
            self.graph.call_function(_set_grad_enabled, (is_enabled,))
            self._is_grad_enabled = is_enabled

    def function(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Add a call of a function."""
        node: Node = self.graph.call_function(target, args, kwargs)
        return node

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        """Add a call of a method of the first argument."""
        node: Node = self.graph.call_method(name, args, kwargs)
        return node

    def mark(self) -> int:
        """How many nodes there are, to go back to."""
        return len(self.graph.nodes)

    def back_to(self, mark: int) -> None:
        """Forget the nodes that were added since."""
        for node in reversed(list(self.graph.nodes)[mark:]):
            self.graph.erase_node(node)

    # Other places ---------------------------------------------------------------

    def stacked(self, value: Value, rank: int | None = None) -> Node:
        """The values along a new dimension 0.

        Args:
            value: Of any place.
            rank: Add dimensions of size 1 in front of those of one value, up to this
                many.
        """
        node, shape = value.node, value.shape
        if value.place == SHARED:
            node = self.method("expand", node, (self.count, *shape))
        elif value.place.is_joined:
            dim = value.place.dim
            sizes = (*shape[:dim], self.count, *shape[dim:])
            node = self.method("reshape", node, sizes)
            if dim:
                node = self.method("movedim", node, dim, 0)
        if rank is not None and rank > len(shape):
            fill = (1,) * (rank - len(shape))
            node = self.method("reshape", node, (self.count, *fill, *shape))
        return node

    def joined(self, value: Value, dim: int) -> Node:
        """The values concatenated along `dim`, a dimension that they have."""
        if value.rank <= dim:
            raise NotFolded
        if value.place == joined(dim):
            return value.node
        if value.place == SHARED:
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
        """All elements of one micro-batch in a row: `[k, elements]`."""
        if value.place == joined(0):
            return self.method(
                "reshape", value.node, (self.count, value.example.numel())
            )
        node = self.stacked(value)
        return self.method("reshape", node, (self.count, value.example.numel()))


@dataclass
class Call:
    """One call of a program, to be folded.

    Attributes:
        folded: The graph it is added to.
        node: It, in the program's graph.
        name: Of the function.
        args: Its arguments, with values for tensors.
        kwargs: The same by name.
        example: What it returns in some micro-batch.
        writes: Whether it changes one of its arguments.
        is_view: Whether its results are views of memory that is written to somewhere:
            the folded ones must be views too.
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
        self.values = list(values_in((self.args, self.kwargs)))

    @property
    def count(self) -> int:
        """Micro-batches that are folded."""
        return self.folded.count

    @property
    def is_method(self) -> bool:
        """Whether it calls a method."""
        return self.node.op == "call_method"

    @property
    def is_shared(self) -> bool:
        """Whether every micro-batch passes the same tensors."""
        return all(value.place == SHARED for value in self.values)

    def refuse(self) -> NoReturn:
        """Leave the call to the micro-batches.

        Raises:
            NotFolded: Always.
        """
        raise NotFolded(self.name)

    def require(self, is_fine: bool) -> None:
        """Refuse unless it is."""
        if not is_fine:
            self.refuse()

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """An argument, by its position or its name."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if len(self.args) > position else default

    def value(self, position: int, name: str) -> Value:
        """An argument that must be a tensor."""
        found = self.get(position, name)
        if not isinstance(found, Value):
            self.refuse()
        return found

    def replaced(
        self, position: int, name: str, new: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with another one of them."""
        return replaced(self.args, self.kwargs, position, name, new)

    def emit(
        self, args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> Node:
        """Add the same call to the folded graph, with other arguments if given."""
        args = self.args if args is None else args
        kwargs = self.kwargs if kwargs is None else kwargs
        node: Node = self.folded.graph.create_node(
            self.node.op,
            self.node.target,
            tuple(map_values(tuple(args), _node_of)),
            map_values(dict(kwargs), _node_of),
        )
        return node

    def result(self, node: Node, places: Place | Sequence[Place]) -> Any:
        """The value of the call, or its values if it returns several."""
        if isinstance(self.example, Tensor):
            place = places if isinstance(places, Place) else places[0]
            return Value(node, place, self.example)
        self.require(isinstance(self.example, (tuple, list)))
        results: list[Value | None] = []
        for index, example in enumerate(self.example):
            if example is None:
                results.append(None)
                continue
            self.require(isinstance(example, Tensor))
            place = places if isinstance(places, Place) else places[index]
            item = self.folded.function(operator.getitem, node, index)
            results.append(Value(item, place, example))
        return tuple(results)


def replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, new: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with another one of them.

    Example:
        >>> replaced((1, 2), {"dim": 3}, 0, "input", 7)
        ((7, 2), {'dim': 3})
    """
    if name in kwargs or len(args) <= position:
        return args, {**kwargs, name: new}
    return (*args[:position], new, *args[position + 1 :]), kwargs


def _node_of(value: Value) -> Node:
    return value.node


def numel(sizes: Sequence[int]) -> int:
    """Elements of a tensor of these sizes."""
    return math.prod(sizes)


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
