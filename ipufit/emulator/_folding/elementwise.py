# SPDX-License-Identifier: Apache-2.0
"""Folded calls that compute each element by itself, or go along given dimensions."""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

from torch import Tensor

from ipufit.emulator._folding.values import (
    SHARED,
    STACKED,
    Call,
    Place,
    Value,
    joined,
    map_values,
    promotes_alike,
)


def shared(call: Call) -> Any:
    """A call that every micro-batch makes with the same tensors, or with none."""
    call.require(call.is_shared)
    return call.result(call.emit(), SHARED)


def elementwise(call: Call) -> Any:
    """A call that broadcasts its tensors and computes each element by itself."""
    call.require(isinstance(call.example, Tensor))
    position = _common_position(call)
    if position is None:
        return _stacked_elementwise(call)
    rank = call.example.dim()
    size = call.example.shape[position]

    def aligned(value: Value) -> Any:
        if value.place != SHARED or value.rank < -position:
            return value.node
        if value.shape[position] == 1 and size > 1:
            return value.node
        return call.folded.joined(value, value.rank + position)

    args, kwargs = _mapped(call, aligned)
    place = joined(rank + position)
    _check_target(call, place)
    return Value(call.emit(args, kwargs), place, call.example)


def _common_position(call: Call) -> int | None:
    """Where values are joined, counted from the last dimension, if all agree."""
    size: int | None = None
    position: int | None = None
    for value in call.values:
        if value.place == SHARED:
            continue
        if not value.place.is_joined:
            return None
        here = value.place.dim - value.rank
        if position not in (None, here) or size not in (None, value.shape[here]):
            return None
        position, size = here, value.shape[here]
    if position is None or call.example.shape[position] != size:
        return None
    # What all micro-batches share is one row for all, or as many as each has.
    for value in call.values:
        if value.rank >= -position and value.shape[position] not in (1, size):
            return None
    return position


def _stacked_elementwise(call: Call) -> Any:
    rank = call.example.dim()
    call.require(promotes_alike(call.values))
    call.require(call.kwargs.get("memory_format") is None)
    call.require(all(value.rank <= rank for value in call.values))

    def stacked(value: Value) -> Any:
        if value.place == SHARED:
            return value.node
        return call.folded.stacked(value, rank)

    _check_target(call, STACKED)
    return Value(call.emit(*_mapped(call, stacked)), STACKED, call.example)


def _check_target(call: Call, place: Place) -> None:
    """A tensor that is written to must be the one that others see."""
    if call.writes:
        target = call.args[0] if call.args else None
        if not isinstance(target, Value):
            call.refuse()
        call.require(target.place == place)
        call.require(target.shape == tuple(call.example.shape))


def _mapped(call: Call, function: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    return map_values(call.args, function), map_values(call.kwargs, function)


def masked_fill(call: Call) -> Any:
    """A fill with one value, which must be the same for all micro-batches."""
    value = call.get(2, "value")
    call.require(not isinstance(value, Value) or value.place == SHARED)
    return elementwise(call)


def fill(call: Call) -> Any:
    """The same for all elements."""
    value = call.get(1, "value")
    call.require(not isinstance(value, Value) or value.place == SHARED)
    return elementwise(call)


def cast(call: Call) -> Any:
    """A call that takes the type of another tensor, not its values."""
    source = call.value(0, "input" if not call.is_method else "self")
    args = tuple(
        value.example.dtype if isinstance(value, Value) else value
        for value in call.args[1:]
    )
    call.require(not any(isinstance(v, Value) for v in call.kwargs.values()))
    node = call.folded.method("to", source.node, *args, **call.kwargs)
    return call.result(node, source.place)


def creation(call: Call) -> Any:
    """A tensor of given sizes, of the type that another one has."""
    source = call.value(0, "self")
    call.require(len(call.values) == 1)
    node = call.emit((source.node, *call.args[1:]))
    return call.result(node, SHARED)


class Along:
    """Calls that combine elements along given dimensions only.

    Args:
        position: Of the argument that names the dimensions, or one dimension.
        default: What it is if it isn't given; None: all dimensions.
        keeps: Whether the result has these dimensions.
        keepdim: Position of the argument that says so, if there is one.
        over_all: What gives the result over all dimensions, called with one: `"same"`
            function, or a method's name. None: there is no such call.
        name: Of the argument that names the dimensions.
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

    def __call__(self, call: Call) -> Any:
        """Fold one such call.

        Raises:
            NotFolded: Its arguments are of another form.
        """
        value = call.value(0, "input")
        call.require(not call.writes and "input" not in call.kwargs)
        call.require(all(v is value or v.place == SHARED for v in call.values))
        if self._is_spread and len(call.args) > self._position + 1:
            before, dims = call.args[: self._position], call.args[self._position :]
            call = dataclasses.replace(call, args=(*before, dims))
        given = call.get(self._position, self._name, self._default)
        keeps = self._keeps
        if self._keepdim is not None:
            keeps = keeps or bool(call.get(self._keepdim, "keepdim", False))
        if given is None or given == () or given == []:
            call.require(not keeps)
            return self._fold_over_all(call, value)
        dims = _positive(call, given, value.rank)
        if value.place.is_joined and value.place.dim not in dims:
            removed = 0 if keeps else sum(dim < value.place.dim for dim in dims)
            return call.result(call.emit(), joined(value.place.dim - removed))
        shifted: Any = tuple(dim + 1 for dim in dims)
        if isinstance(given, int):
            shifted = shifted[0]
        args, kwargs = call.replaced(self._position, self._name, shifted)
        args = (call.folded.stacked(value), *args[1:])
        return call.result(call.emit(args, kwargs), STACKED)

    def _fold_over_all(self, call: Call, value: Value) -> Any:
        call.require(len(call.args) <= self._position + 1)
        call.require(value.example.numel() > 0 and call.example.dim() == 0)
        between = call.args[1 : self._position]
        kwargs = {k: v for k, v in call.kwargs.items() if k != "keepdim"}
        kwargs[self._name] = 1
        flat = call.folded.flat(value)
        if self._over_all is None:
            call.refuse()
        if self._over_all == "same":
            node = call.emit((flat, *between), kwargs)
        else:
            node = call.folded.method(self._over_all, flat, *between, **kwargs)
        return call.result(node, STACKED)


def _positive(call: Call, dims: Any, rank: int) -> tuple[int, ...]:
    numbers = (dims,) if isinstance(dims, int) else dims
    call.require(
        isinstance(numbers, (tuple, list))
        and rank > 0
        and all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)
    )
    return tuple(number % rank for number in numbers)


class Extreme:
    """`max` and `min`: of two tensors, along a dimension, or of all elements.

    Args:
        over_all: The method that finds it along a dimension, and nothing else.
    """

    def __init__(self, over_all: str) -> None:
        self._along = Along(keepdim=2, over_all=over_all)

    def __call__(self, call: Call) -> Any:
        """Fold one such call.

        Raises:
            NotFolded: Its arguments are of another form.
        """
        is_of_two = isinstance(call.get(1, "other"), Value)
        return elementwise(call) if is_of_two else self._along(call)


def spread(call: Call) -> Any:
    """`std` and `var`, whose second argument means one thing or another."""
    call.require(len(call.args) <= 2 and not isinstance(call.get(1, "dim"), bool))
    return _spread(call)


_spread = Along(keepdim=2, over_all="same")
