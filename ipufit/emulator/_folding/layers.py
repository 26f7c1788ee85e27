# SPDX-License-Identifier: Apache-2.0
"""Fold layers: products, convolutions, pooling, norms, attention, recurrent ones."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from ipufit.emulator._folding.values import (
    SHARED,
    STACKED,
    Operation,
    Packing,
    Value,
    joined,
)


class Rows:
    """Folds layers that compute each row of dim 0 by itself, with the same weights.

    Args:
        min_rank: The least number of dimensions of the input.
        rank_of: The position of a weight that must have as many dimensions, if any.
    """

    def __init__(self, min_rank: int = 1, rank_of: int | None = None) -> None:
        self._min_rank = min_rank
        self._rank_of = rank_of

    def __call__(self, op: Operation) -> Any:
        """Fold one such operation.

        Raises:
            NotFolded: Its arguments are of another form.
        """
        value = op.value(0, "input")
        op.require(not op.writes and value.rank >= self._min_rank)
        op.require_rest_shared(value)
        if self._rank_of is not None:
            weight = op.value(self._rank_of, "weight")
            op.require(weight.rank == value.rank)
        return op.of_joined(value)


class Trailing:
    """Folds what combines elements along the last dimensions only.

    Args:
        count: The number of these dimensions, or a function of the operation for it.
        any_rank: Whether there may be any number of dimensions before them.
    """

    def __init__(self, count: Any, *, any_rank: bool = True) -> None:
        self._count = count
        self._any_rank = any_rank

    def __call__(self, op: Operation) -> Any:
        """Fold one such operation.

        Raises:
            NotFolded: Its arguments are of another form.
        """
        value = op.value(0, "input")
        op.require(not op.writes)
        op.require_rest_shared(value)
        touched = self._count(op) if callable(self._count) else self._count
        before = value.rank - touched
        if value.packing.is_joined and value.packing.dim < before:
            return op.unchanged(value.packing)
        if self._any_rank:
            return op.of_stacked(value)
        op.require(before > 0)
        return op.of_joined(value)


def normalized_dims(op: Operation) -> int:
    """The number of dimensions that `layer_norm` normalises over."""
    shape = op.get(1, "normalized_shape")
    op.require(isinstance(shape, (tuple, list)))
    return len(shape)


def batch_norm(op: Operation) -> Any:
    """Fold batch norm that uses its running statistics."""
    op.require(op.get(5, "training", False) is False)
    value = op.value(0, "input")
    op.require(op.get(1, "running_mean") is not None)
    if value.packing.is_joined and value.packing.dim != 1:
        op.require_rest_shared(value)
        return op.unchanged(value.packing)
    return _NORM(op)


def instance_norm(op: Operation) -> Any:
    """Fold instance norm without running statistics."""
    op.require(op.get(1, "running_mean") is None)
    op.require(op.get(2, "running_var") is None)
    return _INSTANCES(op)


_NORM = Rows(min_rank=2)
_INSTANCES = Rows(min_rank=3)


def prelu(op: Operation) -> Any:
    """Fold `prelu` with a slope for each channel of dimension 1, or one for all."""
    weight = op.value(1, "weight")
    op.require(weight.example.numel() == 1 or op.value(0, "input").rank > 1)
    return Rows()(op)


def dropout(op: Operation) -> Any:
    """Fold dropout that drops nothing."""
    is_training = op.get(2, "training", True)
    op.require(is_training is False or op.get(1, "p", 0.5) == 0.0)
    value = op.value(0, "input")
    op.require(not op.writes)
    return op.unchanged(value.packing)


def one_hot(op: Operation) -> Any:
    """Fold `one_hot`, which adds a last dimension."""
    value = op.value(0, "tensor")
    classes = op.get(1, "num_classes", -1)
    op.require(isinstance(classes, int) and classes > 0)
    return op.unchanged(value.packing)


def embedding(op: Operation) -> Any:
    """Fold `embedding`, which adds a last dimension."""
    indices, table = op.value(0, "input"), op.value(1, "weight")
    op.require(table.packing == SHARED)
    for position, name in ((3, "max_norm"), (5, "scale_grad_by_freq"), (6, "sparse")):
        op.require(not op.get(position, name))
    return op.unchanged(indices.packing)


def index_select(op: Operation) -> Any:
    """Fold `index_select` with indices that all micro-batches share."""
    value, index = op.value(0, "input"), op.value(2, "index")
    dim = op.get(1, "dim")
    op.require(index.packing == SHARED and isinstance(dim, int) and value.rank > 0)
    dim %= value.rank
    if value.packing.is_joined and value.packing.dim != dim:
        return op.unchanged(value.packing)
    node = op.emit_with((0, "input", op.folded.stacked(value)), (1, "dim", dim + 1))
    return op.result(node, STACKED)


def gather(op: Operation) -> Any:
    """Fold `gather`, where each element has an index of its own."""
    value, index = op.value(0, "input"), op.value(2, "index")
    dim = op.get(1, "dim")
    op.require(isinstance(dim, int) and value.rank > 0)
    op.require(value.rank == index.rank and len(op.values) == 2)
    packing = index.packing if value.packing == SHARED else value.packing
    dim %= value.rank
    at = packing.dim
    if packing.is_joined and at != dim and value.shape[at] == index.shape[at]:
        tensors = [op.folded.joined(v, at) for v in (value, index)]
    else:
        packing = STACKED
        tensors = [op.folded.stacked(v) for v in (value, index)]
    shift = packing == STACKED
    return op.result(
        op.emit(
            (tensors[0], dim + shift, tensors[1]),
            {k: v for k, v in op.kwargs.items() if k == "sparse_grad"},
        ),
        packing,
    )


# Products ---------------------------------------------------------------------------


def linear(op: Operation) -> Any:
    """Fold `linear`, a product over the last dimension."""
    value, weight = op.value(0, "input"), op.value(1, "weight")
    op.require_rest_shared(value)
    op.require(weight.rank == 2 and value.rank > 0)
    last = value.rank - 1
    if value.packing.is_joined and value.packing.dim != last:
        return op.unchanged(value.packing)
    return op.of_stacked(value)


def matmul(op: Operation) -> Any:
    """Fold a product of matrices, or of stacks of them."""
    op.require(len(op.args) == 2 and not op.kwargs)
    one, two = op.value(0, "input"), op.value(1, "other")
    op.require(one.rank > 1 and two.rank > 1)
    found = [v.packing.dim - v.rank for v in (one, two) if v.packing.is_joined]
    is_stacked = any(v.packing == STACKED for v in (one, two))
    position = found[0] if found and not is_stacked else None
    rank = op.example.dim()
    if position == -2 and two.packing == SHARED and two.rank == 2:
        return op.unchanged(joined(rank - 2))
    if position == -1 and one.packing == SHARED and one.rank == 2:
        return op.unchanged(joined(rank - 1))
    if position is not None and position < -2 and len({*found}) == 1:
        nodes = _same_rows(op, [one, two], position)
        if nodes is not None:
            return op.result(op.emit(nodes), joined(rank + position))
    nodes = [_many_matrices(op, value, rank) for value in (one, two)]
    return op.result(op.folded.function(torch.matmul, *nodes), STACKED)


def _many_matrices(op: Operation, value: Value, rank: int) -> Any:
    if value.packing == SHARED:
        return value.node
    return op.folded.stacked(value, rank)


def _same_rows(
    op: Operation, values: Sequence[Value], position: int
) -> list[Any] | None:
    """Values joined at a dimension before those that a product is about.

    None if they aren't: they differ in size there.
    """
    sizes = {value.shape[position] for value in values if value.packing != SHARED}
    if len(sizes) != 1:
        return None
    (size,) = sizes
    nodes = []
    for value in values:
        is_shared = value.packing == SHARED
        own = value.shape[position] if value.rank >= -position else 1
        if own not in (1, size) or (own == 1 < size and not is_shared):
            return None
        is_one_for_all = is_shared and (own < size or value.rank < -position)
        nodes.append(
            value.node
            if is_one_for_all
            else op.folded.joined(value, value.rank + position)
        )
    return nodes


def addmm(op: Operation) -> Any:
    """Fold `addmm` with a shared weight and bias."""
    bias, rows, weight = (op.value(i, n) for i, n in enumerate(_ADDMM))
    op.require(bias.packing == SHARED and weight.packing == SHARED)
    op.require(bias.rank < 2 or bias.shape[0] == 1)
    node = op.emit_with((1, "mat1", op.folded.joined(rows, 0)))
    return op.result(node, joined(0))


_ADDMM = ("input", "mat1", "mat2")


def einsum(op: Operation) -> Any:
    """Fold `einsum` by one more letter for the micro-batches."""
    equation, *operands = op.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    op.require(isinstance(equation, str) and "->" in equation)
    op.require("..." not in equation and not op.kwargs)
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    spare = next(c for c in _LETTERS if c not in equation)
    new_terms, nodes = [], []
    for term, value in zip(terms, operands):
        op.require(isinstance(value, Value))
        is_shared = value.packing == SHARED
        new_terms.append(term if is_shared else spare + term)
        nodes.append(value.node if is_shared else op.folded.stacked(value))
    folded = f"{','.join(new_terms)}->{spare}{right}"
    return op.result(op.emit((folded, *nodes)), STACKED)


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


# Attention --------------------------------------------------------------------------


def attention(op: Operation) -> Any:
    """Fold `scaled_dot_product_attention` without dropout."""
    op.require(op.get(4, "dropout_p", 0.0) == 0.0)
    given = [op.value(i, n) for i, n in enumerate(_ATTENTION_TENSORS[:3])]
    mask = op.get(3, "attn_mask")
    values = given if mask is None else [*given, mask]
    op.require(len(op.values) == len(values) and all(v.rank > 1 for v in values))
    rank = op.example.dim()
    found = {v.packing.dim - v.rank for v in values if v.packing.is_joined}
    nodes: list[Any] | None = None
    if len(found) == 1 and all(v.packing != STACKED for v in values):
        (position,) = found
        nodes = _same_rows(op, values, position) if position < -2 else None
        packing = joined(rank + position)
    if nodes is None:
        packing = STACKED
        nodes = [op.folded.stacked(v, rank) for v in values]
    node = op.emit_with(*zip(range(4), _ATTENTION_TENSORS, nodes))
    return op.result(node, packing)


_ATTENTION_TENSORS = ("query", "key", "value", "attn_mask")


def multi_head_attention(op: Operation) -> Any:
    """Fold `multi_head_attention_forward` without dropout: rows are in dim 1."""
    op.require(op.get(10, "dropout_p") == 0.0 or not op.get(13, "training", True))
    rows = [op.value(i, n) for i, n in enumerate(_ATTENTION_TENSORS[:3])]
    padding = op.get(14, "key_padding_mask")
    mask = op.get(16, "attn_mask")
    op.require(all(value.rank == 3 for value in rows))
    op.require(padding is None or isinstance(padding, Value))
    op.require(mask is None or (mask.rank == 2 and mask.packing == SHARED))
    own = rows if padding is None else [*rows, padding]
    op.require_rest_shared(*own)
    for name in ("static_k", "static_v"):
        op.require(op.kwargs.get(name) is None)
    nodes = [op.folded.joined(value, 1) for value in rows]
    new: list[tuple[int, str, Any]] = list(zip(range(3), _ATTENTION_TENSORS, nodes))
    if padding is not None:
        new.append((14, "key_padding_mask", op.folded.joined(padding, 0)))
    return op.result(op.emit_with(*new), [joined(1), joined(0)])


# Recurrent layers -------------------------------------------------------------------


class Recurrent:
    """Folds `lstm`, `gru` and the like, of batches, without dropout.

    Args:
        num_states: The number of tensors of the state: 2 for `lstm`.
    """

    def __init__(self, num_states: int = 1) -> None:
        self._num_states = num_states

    def __call__(self, op: Operation) -> Any:
        """Fold one such operation.

        Raises:
            NotFolded: Its arguments are of another form.
        """
        op.require(len(op.args) == 9 and not op.kwargs)
        value, state, weights, _, _, p, is_training, _, is_batch_first = op.args
        op.require(isinstance(value, Value) and value.rank == 3)
        op.require(isinstance(weights, (tuple, list)))
        op.require(all(w.packing == SHARED for w in weights if isinstance(w, Value)))
        op.require(p == 0.0 or not is_training)
        states = list(state) if self._num_states == 2 else [state]
        op.require(all(isinstance(s, Value) and s.rank == 3 for s in states))
        dim = 0 if is_batch_first else 1
        given: Any = [op.folded.joined(s, 1) for s in states]
        given = tuple(given) if self._num_states == 2 else given[0]
        node = op.emit((op.folded.joined(value, dim), given, *op.args[2:]))
        packings: list[Packing] = [joined(dim)] + [joined(1)] * self._num_states
        return op.result(node, packings)
