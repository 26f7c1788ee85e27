# SPDX-License-Identifier: Apache-2.0
"""Fold what computes each element by itself, or goes along given dimensions."""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

from torch import Tensor

from ipufit.emulator._folding.values import (
    SHARED,
    STACKED,
    Operation,
    Packing,
    Value,
    joined,
    map_values,
    promotes_alike,
)


def shared(op: Operation) -> Any:
    """Fold an operation on tensors that all micro-batches share, or on none."""
    op.require(op.is_shared)
    return op.unchanged(SHARED)


def elementwise(op: Operation) -> Any:
    """Fold what broadcasts its tensors and computes each element by itself."""
    op.require(isinstance(op.example, Tensor))
    position = _common_position(op)
    if position is None:
        return _stacked_elementwise(op)
    rank = op.example.dim()
    size = op.example.shape[position]

    def aligned(value: Value) -> Any:
        if value.packing != SHARED or value.rank < -position:
            return value.node
        if value.shape[position] == 1 and size > 1:
            return value.node
        return op.folded.joined(value, value.rank + position)

    args, kwargs = _mapped(op, aligned)
    packing = joined(rank + position)
    _check_target(op, packing)
    return Value(op.emit(args, kwargs), packing, op.example)


def _common_position(op: Operation) -> int | None:
    """The negative dimension along which all values are joined, if they agree."""
    size: int | None = None
    position: int | None = None
    for value in op.values:
        if value.packing == SHARED:
            continue
        if not value.packing.is_joined:
            return None
        here = value.packing.dim - value.rank
        if position not in (None, here) or size not in (None, value.shape[here]):
            return None
        position, size = here, value.shape[here]
    if position is None or op.example.shape[position] != size:
        return None
    # What all micro-batches share is one row for all, or as many as each has.
    for value in op.values:
        if value.rank >= -position and value.shape[position] not in (1, size):
            return None
    return position


def _stacked_elementwise(op: Operation) -> Any:
    rank = op.example.dim()
    op.require(promotes_alike(op.values))
    op.require(op.kwargs.get("memory_format") is None)
    op.require(all(value.rank <= rank for value in op.values))

    def stacked(value: Value) -> Any:
        if value.packing == SHARED:
            return value.node
        return op.folded.stacked(value, rank)

    _check_target(op, STACKED)
    return Value(op.emit(*_mapped(op, stacked)), STACKED, op.example)


def _check_target(op: Operation, packing: Packing) -> None:
    """A tensor that is written to must be the one that others see."""
    if op.writes:
        target = op.args[0] if op.args else None
        if not isinstance(target, Value):
            op.refuse()
        op.require(target.packing == packing)
        op.require(target.shape == tuple(op.example.shape))


def _mapped(op: Operation, function: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    return map_values(op.args, function), map_values(op.kwargs, function)


class Fill:
    """Folds a fill with one value, which must be the same for all micro-batches.

    Args:
        position: The position of the argument that is the value.
    """

    def __init__(self, position: int) -> None:
        self._position = position

    def __call__(self, op: Operation) -> Any:
        """Fold one such operation."""
        value = op.get(self._position, "value")
        op.require(not isinstance(value, Value) or value.packing == SHARED)
        return elementwise(op)


def cast(op: Operation) -> Any:
    """Fold a cast to the type of another tensor."""
    source = op.value(0, "input" if not op.is_method else "self")
    args = tuple(
        value.example.dtype if isinstance(value, Value) else value
        for value in op.args[1:]
    )
    op.require(not any(isinstance(v, Value) for v in op.kwargs.values()))
    node = op.folded.method("to", source.node, *args, **op.kwargs)
    return op.result(node, source.packing)


def creation(op: Operation) -> Any:
    """Fold the creation of a tensor that has the type of another one."""
    source = op.value(0, "self")
    op.require(len(op.values) == 1)
    node = op.emit((source.node, *op.args[1:]))
    return op.result(node, SHARED)


class Along:
    """Folds what combines elements along given dimensions only.

    Args:
        position: The position of the argument that names one dimension, or several.
        default: The dimension if none is given; None: all dimensions.
        keeps: Whether the result has these dimensions.
        keepdim: The position of the argument `keepdim`, if there is one.
        over_all: Computes the result over all dimensions, when called with one:
            `"same"` function, or a method's name. None: nothing does.
        name: The name of the argument that names dimensions.
        is_spread: Whether dimensions may be given one by one: `flip(0, 1)`.
    """

    def __init__(
        self,
        position: int = 1,
        default: int | None = None,
        *,
        keeps: bool = False,
        keepdim: int | None = None,
        over_all: str | None = None,
        name: str = "dim",
        is_spread: bool = False,
    ) -> None:
        self._position = position
        self._default = default
        self._keeps = keeps
        self._keepdim = keepdim
        self._over_all = over_all
        self._name = name
        self._is_spread = is_spread

    def __call__(self, op: Operation) -> Any:
        """Fold one such operation.

        Raises:
            NotFolded: Its arguments are of another form.
        """
        value = op.value(0, "input")
        op.require(not op.writes and "input" not in op.kwargs)
        op.require_rest_shared(value)
        if self._is_spread and len(op.args) > self._position + 1:
            before, dims = op.args[: self._position], op.args[self._position :]
            op = dataclasses.replace(op, args=(*before, dims))
        given = op.get(self._position, self._name, self._default)
        keeps = self._keeps
        if self._keepdim is not None:
            keeps = keeps or bool(op.get(self._keepdim, "keepdim", False))
        if given is None or given == () or given == []:
            op.require(not keeps)
            return self._fold_over_all(op, value)
        dims = _positive(op, given, value.rank)
        if value.packing.is_joined and value.packing.dim not in dims:
            removed = 0 if keeps else sum(dim < value.packing.dim for dim in dims)
            return op.unchanged(joined(value.packing.dim - removed))
        shifted: Any = tuple(dim + 1 for dim in dims)
        if isinstance(given, int):
            shifted = shifted[0]
        node = op.emit_with(
            (0, "input", op.folded.stacked(value)),
            (self._position, self._name, shifted),
        )
        return op.result(node, STACKED)

    def _fold_over_all(self, op: Operation, value: Value) -> Any:
        op.require(len(op.args) <= self._position + 1)
        op.require(value.example.numel() > 0 and op.example.dim() == 0)
        between = op.args[1 : self._position]
        kwargs = {k: v for k, v in op.kwargs.items() if k != "keepdim"}
        kwargs[self._name] = 1
        flat = op.folded.flat(value)
        if self._over_all is None:
            op.refuse()
        if self._over_all == "same":
            node = op.emit((flat, *between), kwargs)
        else:
            node = op.folded.method(self._over_all, flat, *between, **kwargs)
        return op.result(node, STACKED)


def _positive(op: Operation, dims: Any, rank: int) -> tuple[int, ...]:
    numbers = (dims,) if isinstance(dims, int) else dims
    op.require(
        isinstance(numbers, (tuple, list))
        and rank > 0
        and all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)
    )
    return tuple(number % rank for number in numbers)


class Extreme:
    """Folds `max` and `min`: of two tensors, along a dimension, or of all elements.

    Args:
        over_all: The method that gives the values along a dimension, not the indices.
    """

    def __init__(self, over_all: str) -> None:
        self._along = Along(keepdim=2, over_all=over_all)

    def __call__(self, op: Operation) -> Any:
        """Fold one such operation.

        Raises:
            NotFolded: Its arguments are of another form.
        """
        is_of_two = isinstance(op.get(1, "other"), Value)
        return elementwise(op) if is_of_two else self._along(op)


def spread(op: Operation) -> Any:
    """Fold `std` or `var`, unless the second argument says `unbiased`."""
    op.require(len(op.args) <= 2 and not isinstance(op.get(1, "dim"), bool))
    return _spread(op)


_spread = Along(keepdim=2, over_all="same")
