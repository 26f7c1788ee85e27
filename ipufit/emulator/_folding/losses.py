# SPDX-License-Identifier: Apache-2.0
"""Fold losses: they are computed for all rows, and reduced for each micro-batch."""

from __future__ import annotations

import inspect
from typing import Any, Callable

import torch
from torch.fx.node import Node

from ipufit.emulator._folding.elementwise import elementwise
from ipufit.emulator._folding.values import SHARED, STACKED, Operation, Value, joined


def classes_loss(op: Operation) -> Any:
    """Fold `cross_entropy` and `nll_loss`: classes in dimension 1, rows in 0."""
    op.require(op.name != "nll_loss" or len(op.args) < 8)
    given = _bound(op)
    scores, target = given["input"], given["target"]
    op.require(given.get("weight") is None and scores.rank > 1)
    reduction = given["reduction"]
    is_of_indices = not target.example.is_floating_point()
    given["input"] = op.folded.joined(scores, 0)
    given["target"] = op.folded.joined(target, 0)
    given["reduction"] = "none"
    rows = op.emit((), given)
    sizes = (scores.shape[0], *scores.shape[2:])
    example = scores.example.new_empty(sizes)
    losses = Value(rows, joined(0), example)
    if reduction == "none":
        return op.result(rows, joined(0))
    if reduction == "mean" and is_of_indices:
        ignored = given["ignore_index"]
        is_known = op.folded.method("ne", given["target"], ignored)
        known = Value(is_known, joined(0), target.example)
        counts = op.folded.method("sum", op.folded.flat(known), 1)
        total = op.folded.method("sum", op.folded.flat(losses), 1)
        return op.result(op.folded.method("div", total, counts), STACKED)
    return _reduced(op, losses, reduction)


def elements_loss(op: Operation) -> Any:
    """Fold a loss that compares tensors element by element."""
    given = _bound(op)
    reduction = given["reduction"]
    if reduction == "none":
        return elementwise(op)
    is_divided_by_weights = reduction == "mean" and op.name not in _MEANS_OVER_ALL
    op.require(not is_divided_by_weights or given.get("weight") is None)
    given["reduction"] = "none"
    sizes = torch.broadcast_shapes(*(value.shape for value in op.values))  # type: ignore[no-untyped-call,unused-ignore]
    example = op.example.new_empty(sizes)
    one_by_one = Operation(
        op.folded, op.node, op.name, (), given, example, writes=False
    )
    losses = elementwise(one_by_one)
    if reduction == "batchmean":
        total = _reduced(op, losses, "sum")
        rows = given["input"].shape[0]
        return op.result(op.folded.method("div", total.node, rows), STACKED)
    return _reduced(op, losses, reduction)


_MEANS_OVER_ALL = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
"""Losses whose weighted mean is one over all elements, whatever the weights add up to.
"""


def identity_loss(op: Operation) -> Any:
    """Fold the mark of a loss."""
    value = op.value(0, "x")
    reduction = op.get(1, "reduction")
    if reduction == "none":
        return elementwise(op)
    return _reduced(op, value, reduction)


def _reduced(op: Operation, losses: Value, reduction: str) -> Any:
    op.require(reduction in ("sum", "mean") and losses.packing != SHARED)
    function: Callable[..., Any] = torch.sum if reduction == "sum" else torch.mean
    node: Node = op.folded.function(function, op.folded.flat(losses), 1)
    return op.result(node, STACKED)


def _bound(op: Operation) -> dict[str, Any]:
    """Give the arguments by name, with the defaults."""
    target: Any = op.node.target
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # a function of C without one
        op.refuse()
    bound = signature.bind(*op.args, **op.kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    op.require("reduction" in given)
    for name in ("size_average", "reduce"):
        op.require(given.get(name) is None)
    return given
