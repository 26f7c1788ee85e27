# SPDX-License-Identifier: Apache-2.0
"""Folded calls that only move elements: views, concatenations, slices."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from ipufit.emulator._folding.values import (
    SHARED,
    STACKED,
    Call,
    Place,
    Value,
    joined,
    numel,
)

_WHOLE = slice(None)


def reshape(call: Call) -> Any:
    """Other sizes for the same elements in the same order.

    Joined values stay joined if a dimension of the result begins where theirs did:
    with as many elements per step of the dimensions before it.
    """
    value = call.value(0, "input")
    call.require(isinstance(call.example, Tensor) and not call.writes)
    call.require(call.example.dtype == value.example.dtype)
    method = "view" if call.is_view else "reshape"
    sizes = tuple(call.example.shape)
    if value.place == SHARED:  # as another tensor, which is not
        return call.result(call.folded.method(method, value.node, sizes), SHARED)
    if value.place.is_joined:
        dim = _same_start(value.shape, value.place.dim, sizes)
        # What is a view for one row may have no view for several.
        call.require(not call.is_view or value.shape[value.place.dim] > 1)
        if dim is not None:
            folded = (*sizes[:dim], sizes[dim] * call.count, *sizes[dim + 1 :])
            return call.result(
                call.folded.method(method, value.node, folded), joined(dim)
            )
    node = call.folded.stacked(value)
    node = call.folded.method("reshape", node, (call.count, *sizes))
    return call.result(node, STACKED)


def _same_start(
    sizes: tuple[int, ...], dim: int, others: tuple[int, ...]
) -> int | None:
    before = numel(sizes[:dim])
    fits = [d for d in range(len(others)) if numel(others[:d]) == before]
    if numel(sizes) == 0 or not fits:
        return None
    # Several differ in dimensions of size 1 only: the alike one, or a multiple.
    alike = [d for d in fits if others[d] == sizes[dim]]
    multiples = [d for d in fits if others[d] % sizes[dim] == 0]
    return [*alike, *multiples, *fits][0]


def permute(call: Call) -> Any:
    """Other places for the dimensions, or new ones of size 1."""
    value = call.value(0, "input")
    call.require(isinstance(call.example, Tensor) and not call.writes)
    origin = _origin_of_dims(call, value)
    if value.place.is_joined:
        return call.result(call.emit(), joined(origin.index(value.place.dim)))
    old = [dim + 1 for dim in origin if dim is not None]
    node = call.folded.method("permute", call.folded.stacked(value), (0, *old))
    for dim, source in enumerate(origin):
        if source is None:
            node = call.folded.method("unsqueeze", node, dim + 1)
    return call.result(node, STACKED)


def transposed(call: Call) -> Any:
    """`tensor.T` and the like."""
    call.require(call.args[1] in ("T", "mT"))
    return permute(call)


def _origin_of_dims(call: Call, value: Value) -> list[int | None]:
    """For each dimension of the result that of the argument; None for a new one."""
    sizes = list(range(2, value.rank + 2))  # all different, and none is 1
    probe = torch.empty(sizes, device="meta")
    call.require(call.args[0] is value and len(call.values) == 1)
    args, kwargs = (probe, *call.args[1:]), call.kwargs
    if call.is_method:
        result = getattr(args[0], str(call.node.target))(*args[1:], **kwargs)
    else:
        target: Any = call.node.target
        result = target(*args, **kwargs)
    call.require(sorted(s for s in result.shape if s > 1) == sizes)
    return [size - 2 if size > 1 else None for size in result.shape]


def squeeze(call: Call) -> Any:
    """Without dimensions of size 1."""
    value = call.value(0, "input")
    call.require(not call.writes and len(call.values) == 1)
    given = call.get(1, "dim")
    numbers = range(value.rank) if given is None else given
    dims = [numbers] if isinstance(numbers, int) else list(numbers)
    call.require(value.rank > 0)
    gone = {dim % value.rank for dim in dims if value.shape[dim] == 1}
    if value.place.is_joined and value.place.dim not in gone:
        node = value.node
        for dim in sorted(gone, reverse=True):
            node = call.folded.method("squeeze", node, dim)
        place = joined(value.place.dim - sum(dim < value.place.dim for dim in gone))
        return call.result(node, place)
    node = call.folded.stacked(value)
    for dim in sorted(gone, reverse=True):
        node = call.folded.method("squeeze", node, dim + 1)
    return call.result(node, STACKED)


def expand(call: Call) -> Any:
    """Copies along dimensions of size 1, and along new ones."""
    value = call.value(0, "input")
    call.require(isinstance(call.example, Tensor))
    sizes = tuple(call.example.shape)
    shift = len(sizes) - value.rank
    if value.place == SHARED:  # as another tensor, which is not
        return call.result(call.folded.method("expand", value.node, sizes), SHARED)
    if value.place.is_joined:
        dim = value.place.dim + shift
        if sizes[dim] == value.shape[value.place.dim]:
            folded = (*sizes[:dim], sizes[dim] * call.count, *sizes[dim + 1 :])
            node = call.folded.method("expand", value.node, folded)
            return call.result(node, joined(dim))
    node = call.folded.stacked(value, len(sizes))
    return call.result(
        call.folded.method("expand", node, (call.count, *sizes)), STACKED
    )


def repeat(call: Call) -> Any:
    """Copies side by side."""
    value = call.value(0, "input")
    given = call.args[1:]
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = tuple(given[0])
    call.require(bool(given) and not call.kwargs)
    call.require(all(isinstance(times, int) for times in given))
    given = (1,) * (value.rank - len(given)) + given  # for tile
    node = call.folded.stacked(value, len(given))
    return call.result(call.folded.method("repeat", node, (1, *given)), STACKED)


class Concatenation:
    """`cat` and `stack`.

    Args:
        is_new: Whether the dimension is a new one.
    """

    def __init__(self, *, is_new: bool) -> None:
        self._is_new = is_new

    def __call__(self, call: Call) -> Any:
        """Fold one such call.

        Raises:
            NotFolded: Its arguments are of another form.
        """
        tensors = call.get(0, "tensors")
        call.require(isinstance(tensors, (tuple, list)) and "out" not in call.kwargs)
        call.require(all(isinstance(value, Value) for value in tensors))
        call.require(len({value.rank for value in tensors}) == 1)
        rank = call.example.dim()
        dim = call.get(1, "dim", 0)
        call.require(isinstance(dim, int) and rank > 0)
        dim %= rank
        places = {value.place for value in tensors if value.place != SHARED}
        (place, *others) = places
        if place.is_joined and not others and (self._is_new or place.dim != dim):
            nodes = [call.folded.joined(value, place.dim) for value in tensors]
            shift = self._is_new and dim <= place.dim
            return self._result(call, nodes, dim, joined(place.dim + shift))
        nodes = [call.folded.stacked(value) for value in tensors]
        return self._result(call, nodes, dim + 1, STACKED)

    def _result(self, call: Call, nodes: list[Any], dim: int, place: Place) -> Any:
        function = torch.stack if self._is_new else torch.cat
        return call.result(call.folded.function(function, nodes, dim), place)


def index(call: Call) -> Any:
    """`tensor[...]` with numbers, slices, `...`, None; an item of several results."""
    found, key = call.args
    if not isinstance(found, Value):
        call.require(call.node.target is operator.getitem)
        return found[key]
    parts, dim = _split_key(call, found, key)
    if dim is None:
        node = call.folded.stacked(found)
        getitem = call.folded.method("__getitem__", node, (_WHOLE, *parts))
        return call.result(getitem, STACKED)
    return call.result(
        call.folded.method("__getitem__", found.node, tuple(parts)), joined(dim)
    )


def _split_key(call: Call, value: Value, key: Any) -> tuple[list[Any], int | None]:
    """The parts of a key, one for each dimension or new one; where it leaves rows.

    The second is None if it cuts the dimension along which values are joined.
    """
    parts = list(key) if isinstance(key, tuple) else [key]
    for part in parts:
        is_plain = part is None or part is Ellipsis or isinstance(part, (int, slice))
        call.require(is_plain and not isinstance(part, bool))
        if isinstance(part, slice):
            bounds = (part.start, part.stop, part.step)
            call.require(all(b is None or isinstance(b, int) for b in bounds))
    used = sum(part is not None and part is not Ellipsis for part in parts)
    fill = [_WHOLE] * (value.rank - used)
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = fill
    else:
        parts += fill
    source = result = 0
    kept: int | None = None
    for position, part in enumerate(parts):
        if part is None:
            result += 1
            continue
        if isinstance(part, slice):
            size = value.shape[source]
            if part.indices(size) == (0, size, 1):
                parts[position] = _WHOLE
                if value.place == joined(source):
                    kept = result
            result += 1
        source += 1
    return parts, kept


def pad(call: Call) -> Any:
    """`F.pad`: values around those of the last dimensions."""
    value = call.value(0, "input")
    sizes = call.get(1, "pad")
    call.require(isinstance(sizes, (tuple, list)) and len(call.values) == 1)
    touched = len(sizes) // 2
    mode = call.get(2, "mode", "constant")
    if value.place.is_joined and value.place.dim < value.rank - touched:
        return call.result(call.emit(), value.place)
    call.require(mode == "constant")
    args, kwargs = call.replaced(0, "input", call.folded.stacked(value))
    return call.result(call.emit(args, kwargs), STACKED)
