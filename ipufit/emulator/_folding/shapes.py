# SPDX-License-Identifier: Apache-2.0
"""Fold what only moves elements: views, concatenations, slices."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
from torch import Tensor

from ipufit.emulator._folding.values import (
    SHARED,
    STACKED,
    Operation,
    Packing,
    Value,
    joined,
)

_WHOLE = slice(None)


def reshape(op: Operation) -> Any:
    """Fold what gives other sizes to the same elements in the same order.

    Joined values stay joined if a dimension of the result begins where theirs did:
    with as many elements per step of the dimensions before it.
    """
    value = op.value(0, "input")
    op.require(isinstance(op.example, Tensor) and not op.writes)
    op.require(op.example.dtype == value.example.dtype)
    method = "view" if op.is_view else "reshape"
    sizes = tuple(op.example.shape)
    if value.packing == SHARED:  # as another tensor, which is not
        return op.result(op.folded.method(method, value.node, sizes), SHARED)
    if value.packing.is_joined:
        dim = _same_start(value.shape, value.packing.dim, sizes)
        # What is a view for one row may have no view for several.
        op.require(not op.is_view or value.shape[value.packing.dim] > 1)
        if dim is not None:
            folded = (*sizes[:dim], sizes[dim] * op.count, *sizes[dim + 1 :])
            return op.result(op.folded.method(method, value.node, folded), joined(dim))
    node = op.folded.stacked(value)
    node = op.folded.method("reshape", node, (op.count, *sizes))
    return op.result(node, STACKED)


def _same_start(
    sizes: tuple[int, ...], dim: int, others: tuple[int, ...]
) -> int | None:
    before = prod(sizes[:dim])
    fits = [d for d in range(len(others)) if prod(others[:d]) == before]
    if prod(sizes) == 0 or not fits:
        return None
    # Several differ in dimensions of size 1 only: the alike one, or a multiple.
    alike = [d for d in fits if others[d] == sizes[dim]]
    multiples = [d for d in fits if others[d] % sizes[dim] == 0]
    return [*alike, *multiples, *fits][0]


def permute(op: Operation) -> Any:
    """Fold what reorders dimensions, or adds some of size 1."""
    value = op.value(0, "input")
    op.require(isinstance(op.example, Tensor) and not op.writes)
    origin = _origin_of_dims(op, value)
    if value.packing.is_joined:
        return op.unchanged(joined(origin.index(value.packing.dim)))
    old = [dim + 1 for dim in origin if dim is not None]
    node = op.folded.method("permute", op.folded.stacked(value), (0, *old))
    for dim, source in enumerate(origin):
        if source is None:
            node = op.folded.method("unsqueeze", node, dim + 1)
    return op.result(node, STACKED)


def transposed(op: Operation) -> Any:
    """Fold `tensor.T` and `tensor.mT`."""
    op.require(op.args[1] in ("T", "mT"))
    return permute(op)


def _origin_of_dims(op: Operation, value: Value) -> list[int | None]:
    """For each dimension of the result that of the argument; None for a new one."""
    sizes = list(range(2, value.rank + 2))  # all different, and none is 1
    probe = torch.empty(sizes, device="meta")
    op.require(op.args[0] is value and len(op.values) == 1)
    args, kwargs = (probe, *op.args[1:]), op.kwargs
    if op.is_method:
        result = getattr(args[0], str(op.node.target))(*args[1:], **kwargs)
    else:
        target: Any = op.node.target
        result = target(*args, **kwargs)
    op.require(sorted(s for s in result.shape if s > 1) == sizes)
    return [size - 2 if size > 1 else None for size in result.shape]


def squeeze(op: Operation) -> Any:
    """Fold `squeeze`."""
    value = op.value(0, "input")
    op.require(not op.writes and len(op.values) == 1)
    given = op.get(1, "dim")
    numbers = range(value.rank) if given is None else given
    dims = [numbers] if isinstance(numbers, int) else list(numbers)
    op.require(value.rank > 0)
    gone = {dim % value.rank for dim in dims if value.shape[dim] == 1}
    if value.packing.is_joined and value.packing.dim not in gone:
        node = value.node
        for dim in sorted(gone, reverse=True):
            node = op.folded.method("squeeze", node, dim)
        packing = joined(
            value.packing.dim - sum(dim < value.packing.dim for dim in gone)
        )
        return op.result(node, packing)
    node = op.folded.stacked(value)
    for dim in sorted(gone, reverse=True):
        node = op.folded.method("squeeze", node, dim + 1)
    return op.result(node, STACKED)


def expand(op: Operation) -> Any:
    """Fold `expand` and the like."""
    value = op.value(0, "input")
    op.require(isinstance(op.example, Tensor))
    sizes = tuple(op.example.shape)
    shift = len(sizes) - value.rank
    if value.packing == SHARED:  # as another tensor, which is not
        return op.result(op.folded.method("expand", value.node, sizes), SHARED)
    if value.packing.is_joined:
        dim = value.packing.dim + shift
        if sizes[dim] == value.shape[value.packing.dim]:
            folded = (*sizes[:dim], sizes[dim] * op.count, *sizes[dim + 1 :])
            node = op.folded.method("expand", value.node, folded)
            return op.result(node, joined(dim))
    node = op.folded.stacked(value, len(sizes))
    return op.result(op.folded.method("expand", node, (op.count, *sizes)), STACKED)


def repeat(op: Operation) -> Any:
    """Fold `repeat` and `tile`."""
    value = op.value(0, "input")
    given = op.args[1:]
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = tuple(given[0])
    op.require(bool(given) and not op.kwargs)
    op.require(all(isinstance(times, int) for times in given))
    given = (1,) * (value.rank - len(given)) + given  # for tile
    node = op.folded.stacked(value, len(given))
    return op.result(op.folded.method("repeat", node, (1, *given)), STACKED)


class Concatenation:
    """Folds `cat` and `stack`.

    Args:
        is_new: Whether the dimension is a new one, as for `stack`.
    """

    def __init__(self, *, is_new: bool) -> None:
        self._is_new = is_new

    def __call__(self, op: Operation) -> Any:
        """Fold one such operation.

        Raises:
            NotFolded: Its arguments are of another form.
        """
        tensors = op.get(0, "tensors")
        op.require(isinstance(tensors, (tuple, list)) and "out" not in op.kwargs)
        op.require(all(isinstance(value, Value) for value in tensors))
        op.require(len({value.rank for value in tensors}) == 1)
        rank = op.example.dim()
        dim = op.get(1, "dim", 0)
        op.require(isinstance(dim, int) and rank > 0)
        dim %= rank
        packing, *others = {v.packing for v in tensors if v.packing != SHARED}
        if packing.is_joined and not others and (self._is_new or packing.dim != dim):
            nodes = [op.folded.joined(value, packing.dim) for value in tensors]
            shift = self._is_new and dim <= packing.dim
            return self._result(op, nodes, dim, joined(packing.dim + shift))
        nodes = [op.folded.stacked(value) for value in tensors]
        return self._result(op, nodes, dim + 1, STACKED)

    def _result(
        self, op: Operation, nodes: list[Any], dim: int, packing: Packing
    ) -> Any:
        function = torch.stack if self._is_new else torch.cat
        return op.result(op.folded.function(function, nodes, dim), packing)


def index(op: Operation) -> Any:
    """Fold an index of numbers, slices, `...` and None, or an item of a tuple."""
    found, key = op.args
    if not isinstance(found, Value):
        op.require(op.node.target is operator.getitem)
        return found[key]
    parts, dim = _split_key(op, found, key)
    if dim is None:
        node = op.folded.stacked(found)
        getitem = op.folded.method("__getitem__", node, (_WHOLE, *parts))
        return op.result(getitem, STACKED)
    return op.result(
        op.folded.method("__getitem__", found.node, tuple(parts)), joined(dim)
    )


def _split_key(op: Operation, value: Value, key: Any) -> tuple[list[Any], int | None]:
    """The parts of a key, one for each dimension or new one; where it leaves rows.

    The second is None if it cuts the dimension along which values are joined.
    """
    parts = list(key) if isinstance(key, tuple) else [key]
    for part in parts:
        is_plain = part is None or part is Ellipsis or isinstance(part, (int, slice))
        op.require(is_plain and not isinstance(part, bool))
        if isinstance(part, slice):
            bounds = (part.start, part.stop, part.step)
            op.require(all(b is None or isinstance(b, int) for b in bounds))
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
                if value.packing == joined(source):
                    kept = result
            result += 1
        source += 1
    return parts, kept


def pad(op: Operation) -> Any:
    """Fold `pad`, which adds values around the last dimensions."""
    value = op.value(0, "input")
    sizes = op.get(1, "pad")
    op.require(isinstance(sizes, (tuple, list)) and len(op.values) == 1)
    touched = len(sizes) // 2
    mode = op.get(2, "mode", "constant")
    if value.packing.is_joined and value.packing.dim < value.rank - touched:
        return op.unchanged(value.packing)
    op.require(mode == "constant")
    return op.of_stacked(value)
