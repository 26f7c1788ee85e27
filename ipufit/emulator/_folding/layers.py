# SPDX-License-Identifier: Apache-2.0
"""Folded layers: products, convolutions, pooling, norms, attention, recurrent ones."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from ipufit.emulator._folding.values import (
    SHARED,
    STACKED,
    Call,
    Place,
    Value,
    joined,
    replaced,
)


class Rows:
    """Layers that treat what is in dim 0 by itself, with the same weights for all.

    Args:
        min_rank: Dimensions that the first argument has at least.
        rank_of: Position of the weight that has as many dimensions, if any.
    """

    def __init__(self, min_rank: int = 1, rank_of: int | None = None) -> None:
        self._min_rank = min_rank
        self._rank_of = rank_of

    def __call__(self, call: Call) -> Any:
        """Fold one such call.

        Raises:
            NotFolded: Its arguments are of another form.
        """
        value = call.value(0, "input")
        call.require(not call.writes and value.rank >= self._min_rank)
        call.require(all(v is value or v.place == SHARED for v in call.values))
        if self._rank_of is not None:
            weight = call.value(self._rank_of, "weight")
            call.require(weight.rank == value.rank)
        args, kwargs = call.replaced(0, "input", call.folded.joined(value, 0))
        return call.result(call.emit(args, kwargs), joined(0))


class Trailing:
    """Calls that combine elements along the last dimensions only.

    Args:
        count: How many of them, or a function of the call that says so.
        any_rank: Whether there may be any number of dimensions before them.
    """

    def __init__(self, count: Any, *, any_rank: bool = True) -> None:
        self._count = count
        self._any_rank = any_rank

    def __call__(self, call: Call) -> Any:
        """Fold one such call.

        Raises:
            NotFolded: Its arguments are of another form.
        """
        value = call.value(0, "input")
        call.require(not call.writes)
        call.require(all(v is value or v.place == SHARED for v in call.values))
        touched = self._count(call) if callable(self._count) else self._count
        before = value.rank - touched
        if value.place.is_joined and value.place.dim < before:
            return call.result(call.emit(), value.place)
        if self._any_rank:
            args, kwargs = call.replaced(0, "input", call.folded.stacked(value))
            return call.result(call.emit(args, kwargs), STACKED)
        call.require(before > 0)
        args, kwargs = call.replaced(0, "input", call.folded.joined(value, 0))
        return call.result(call.emit(args, kwargs), joined(0))


def normalized_dims(call: Call) -> int:
    """The dimensions that `layer_norm` normalises over."""
    shape = call.get(1, "normalized_shape")
    call.require(isinstance(shape, (tuple, list)))
    return len(shape)


def pooling(dims: int) -> Trailing:
    """Pooling over so many dimensions."""
    return Trailing(dims, any_rank=False)


def batch_norm(call: Call) -> Any:
    """Batch norm with the statistics that it has learnt."""
    call.require(call.get(5, "training", False) is False)
    value = call.value(0, "input")
    call.require(call.get(1, "running_mean") is not None)
    if value.place.is_joined and value.place.dim != 1:
        call.require(all(v is value or v.place == SHARED for v in call.values))
        return call.result(call.emit(), value.place)
    return _NORM(call)


def instance_norm(call: Call) -> Any:
    """Instance norm without running statistics."""
    call.require(call.get(1, "running_mean") is None)
    call.require(call.get(2, "running_var") is None)
    return _INSTANCES(call)


_NORM = Rows(min_rank=2)
_INSTANCES = Rows(min_rank=3)


def prelu(call: Call) -> Any:
    """A slope for each channel, which is dimension 1, or one for all."""
    weight = call.value(1, "weight")
    call.require(weight.example.numel() == 1 or call.value(0, "input").rank > 1)
    return Rows()(call)


def dropout(call: Call) -> Any:
    """Dropout that drops nothing: it gives its argument."""
    is_training = call.get(2, "training", True)
    call.require(is_training is False or call.get(1, "p", 0.5) == 0.0)
    value = call.value(0, "input")
    call.require(not call.writes)
    return call.result(call.emit(), value.place)


def one_hot(call: Call) -> Any:
    """A new last dimension."""
    value = call.value(0, "tensor")
    classes = call.get(1, "num_classes", -1)
    call.require(isinstance(classes, int) and classes > 0)
    return call.result(call.emit(), value.place)


def embedding(call: Call) -> Any:
    """Rows of a table, in a new last dimension."""
    indices, table = call.value(0, "input"), call.value(1, "weight")
    call.require(table.place == SHARED)
    for position, name in ((3, "max_norm"), (5, "scale_grad_by_freq"), (6, "sparse")):
        call.require(not call.get(position, name))
    return call.result(call.emit(), indices.place)


def index_select(call: Call) -> Any:
    """Places along one dimension that all micro-batches choose alike."""
    value, index = call.value(0, "input"), call.value(2, "index")
    dim = call.get(1, "dim")
    call.require(index.place == SHARED and isinstance(dim, int) and value.rank > 0)
    dim %= value.rank
    if value.place.is_joined and value.place.dim != dim:
        return call.result(call.emit(), value.place)
    args, kwargs = call.replaced(1, "dim", dim + 1)
    args, kwargs = (call.folded.stacked(value), *args[1:]), kwargs
    return call.result(call.emit(args, kwargs), STACKED)


def gather(call: Call) -> Any:
    """Places along one dimension that each element chooses."""
    value, index = call.value(0, "input"), call.value(2, "index")
    dim = call.get(1, "dim")
    call.require(isinstance(dim, int) and value.rank > 0)
    call.require(value.rank == index.rank and len(call.values) == 2)
    place = index.place if value.place == SHARED else value.place
    dim %= value.rank
    at = place.dim
    if place.is_joined and at != dim and value.shape[at] == index.shape[at]:
        tensors = [call.folded.joined(v, at) for v in (value, index)]
    else:
        place = STACKED
        tensors = [call.folded.stacked(v) for v in (value, index)]
    shift = place == STACKED
    return call.result(
        call.emit(
            (tensors[0], dim + shift, tensors[1]),
            {k: v for k, v in call.kwargs.items() if k == "sparse_grad"},
        ),
        place,
    )


# Products ---------------------------------------------------------------------------


def linear(call: Call) -> Any:
    """A product with a weight over the last dimension."""
    value, weight = call.value(0, "input"), call.value(1, "weight")
    call.require(all(v is value or v.place == SHARED for v in call.values))
    call.require(weight.rank == 2 and value.rank > 0)
    last = value.rank - 1
    if value.place.is_joined and value.place.dim != last:
        return call.result(call.emit(), value.place)
    args, kwargs = call.replaced(0, "input", call.folded.stacked(value))
    return call.result(call.emit(args, kwargs), STACKED)


def matmul(call: Call) -> Any:
    """A product of matrices, or of stacks of them."""
    call.require(len(call.args) == 2 and not call.kwargs)
    one, two = call.value(0, "input"), call.value(1, "other")
    call.require(one.rank > 1 and two.rank > 1)
    found = [v.place.dim - v.rank for v in (one, two) if v.place.is_joined]
    is_stacked = any(v.place == STACKED for v in (one, two))
    position = found[0] if found and not is_stacked else None
    rank = call.example.dim()
    if position == -2 and two.place == SHARED and two.rank == 2:
        return call.result(call.emit(), joined(rank - 2))
    if position == -1 and one.place == SHARED and one.rank == 2:
        return call.result(call.emit(), joined(rank - 1))
    if position is not None and position < -2 and len({*found}) == 1:
        nodes = _same_rows(call, [one, two], position)
        if nodes is not None:
            return call.result(call.emit(nodes), joined(rank + position))
    nodes = [_many_matrices(call, value, rank) for value in (one, two)]
    return call.result(call.folded.function(torch.matmul, *nodes), STACKED)


def _many_matrices(call: Call, value: Value, rank: int) -> Any:
    if value.place == SHARED:
        return value.node
    return call.folded.stacked(value, rank)


def _same_rows(call: Call, values: Sequence[Value], position: int) -> list[Any] | None:
    """Values joined at a dimension before those that a product is about.

    None if they aren't: they differ in size there.
    """
    sizes = {value.shape[position] for value in values if value.place != SHARED}
    if len(sizes) != 1:
        return None
    (size,) = sizes
    nodes = []
    for value in values:
        is_shared = value.place == SHARED
        own = value.shape[position] if value.rank >= -position else 1
        if own not in (1, size) or (own == 1 < size and not is_shared):
            return None
        is_one_for_all = is_shared and (own < size or value.rank < -position)
        nodes.append(
            value.node
            if is_one_for_all
            else call.folded.joined(value, value.rank + position)
        )
    return nodes


def addmm(call: Call) -> Any:
    """A product with a weight, and a bias."""
    bias, rows, weight = (call.value(i, n) for i, n in enumerate(_ADDMM))
    call.require(bias.place == SHARED and weight.place == SHARED)
    call.require(bias.rank < 2 or bias.shape[0] == 1)
    args, kwargs = call.replaced(1, "mat1", call.folded.joined(rows, 0))
    return call.result(call.emit(args, kwargs), joined(0))


_ADDMM = ("input", "mat1", "mat2")


def einsum(call: Call) -> Any:
    """Sums of products whose indices have letters."""
    equation, *operands = call.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    call.require(isinstance(equation, str) and "->" in equation)
    call.require("..." not in equation and not call.kwargs)
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    spare = next(c for c in _LETTERS if c not in equation)
    new_terms, nodes = [], []
    for term, value in zip(terms, operands):
        call.require(isinstance(value, Value))
        is_shared = value.place == SHARED
        new_terms.append(term if is_shared else spare + term)
        nodes.append(value.node if is_shared else call.folded.stacked(value))
    folded = f"{','.join(new_terms)}->{spare}{right}"
    return call.result(call.emit((folded, *nodes)), STACKED)


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


# Attention --------------------------------------------------------------------------


def attention(call: Call) -> Any:
    """`scaled_dot_product_attention` without dropout."""
    call.require(call.get(4, "dropout_p", 0.0) == 0.0)
    given = [call.value(i, n) for i, n in enumerate(_ATTENTION_TENSORS[:3])]
    mask = call.get(3, "attn_mask")
    values = given if mask is None else [*given, mask]
    call.require(len(call.values) == len(values) and all(v.rank > 1 for v in values))
    rank = call.example.dim()
    found = {v.place.dim - v.rank for v in values if v.place.is_joined}
    nodes: list[Any] | None = None
    if len(found) == 1 and all(v.place != STACKED for v in values):
        (position,) = found
        nodes = _same_rows(call, values, position) if position < -2 else None
        place = joined(rank + position)
    if nodes is None:
        place = STACKED
        nodes = [call.folded.stacked(v, rank) for v in values]
    args, kwargs = call.args, call.kwargs
    for position, (name, node) in enumerate(zip(_ATTENTION_TENSORS, nodes)):
        args, kwargs = replaced(args, kwargs, position, name, node)
    return call.result(call.emit(args, kwargs), place)


_ATTENTION_TENSORS = ("query", "key", "value", "attn_mask")


def multi_head_attention(call: Call) -> Any:
    """`multi_head_attention_forward` without dropout: sequence first, then rows."""
    call.require(call.get(10, "dropout_p") == 0.0 or not call.get(13, "training", True))
    rows = [call.value(i, n) for i, n in enumerate(_ATTENTION_TENSORS[:3])]
    padding = call.get(14, "key_padding_mask")
    mask = call.get(16, "attn_mask")
    call.require(all(value.rank == 3 for value in rows))
    call.require(padding is None or isinstance(padding, Value))
    call.require(mask is None or (mask.rank == 2 and mask.place == SHARED))
    own = [*rows, *([] if padding is None else [padding])]
    rest = [v for v in call.values if all(v is not other for other in own)]
    call.require(all(v.place == SHARED for v in rest))
    for name in ("static_k", "static_v"):
        call.require(call.kwargs.get(name) is None)
    args, kwargs = call.args, call.kwargs
    for position, (name, value) in enumerate(zip(_ATTENTION_TENSORS, rows)):
        node = call.folded.joined(value, 1)
        args, kwargs = replaced(args, kwargs, position, name, node)
    if padding is not None:
        node = call.folded.joined(padding, 0)
        args, kwargs = replaced(args, kwargs, 14, "key_padding_mask", node)
    return call.result(call.emit(args, kwargs), [joined(1), joined(0)])


# Recurrent layers -------------------------------------------------------------------


class Recurrent:
    """`lstm`, `gru` and the like, of batches, without dropout.

    Args:
        num_states: Tensors that make up the state: 2 for `lstm`.
    """

    def __init__(self, num_states: int = 1) -> None:
        self._num_states = num_states

    def __call__(self, call: Call) -> Any:
        """Fold one such call.

        Raises:
            NotFolded: Its arguments are of another form.
        """
        call.require(len(call.args) == 9 and not call.kwargs)
        value, state, weights, _, _, p, is_training, _, is_batch_first = call.args
        call.require(isinstance(value, Value) and value.rank == 3)
        call.require(isinstance(weights, (tuple, list)))
        call.require(all(w.place == SHARED for w in weights if isinstance(w, Value)))
        call.require(p == 0.0 or not is_training)
        states = list(state) if self._num_states == 2 else [state]
        call.require(all(isinstance(s, Value) and s.rank == 3 for s in states))
        dim = 0 if is_batch_first else 1
        given: Any = [call.folded.joined(s, 1) for s in states]
        given = tuple(given) if self._num_states == 2 else given[0]
        node = call.emit((call.folded.joined(value, dim), given, *call.args[2:]))
        places: list[Place] = [joined(dim)] + [joined(1)] * self._num_states
        return call.result(node, places)
