# SPDX-License-Identifier: Apache-2.0
"""Folded losses: computed for all rows, reduced for each micro-batch."""

from __future__ import annotations

import inspect
from typing import Any, Callable

import torch
from torch.fx.node import Node

from ipufit.emulator._folding.elementwise import elementwise
from ipufit.emulator._folding.values import SHARED, STACKED, Call, Value, joined


def classes_loss(call: Call) -> Any:
    """`cross_entropy` and `nll_loss`: classes in dimension 1, rows in 0."""
    call.require(call.name != "nll_loss" or len(call.args) < 8)
    given = _bound(call)
    scores, target = given["input"], given["target"]
    call.require(given.get("weight") is None and scores.rank > 1)
    reduction = given["reduction"]
    is_of_indices = not target.example.is_floating_point()
    given["input"] = call.folded.joined(scores, 0)
    given["target"] = call.folded.joined(target, 0)
    given["reduction"] = "none"
    rows = call.emit((), given)
    sizes = (scores.shape[0], *scores.shape[2:])
    example = scores.example.new_empty(sizes)
    losses = Value(rows, joined(0), example)
    if reduction == "none":
        return call.result(rows, joined(0))
    if reduction == "mean" and is_of_indices:
        ignored = given["ignore_index"]
        is_known = call.folded.method("ne", given["target"], ignored)
        known = Value(is_known, joined(0), target.example)
        counts = call.folded.method("sum", call.folded.flat(known), 1)
        total = call.folded.method("sum", call.folded.flat(losses), 1)
        return call.result(call.folded.method("div", total, counts), STACKED)
    return _reduced(call, losses, reduction)


def elements_loss(call: Call) -> Any:
    """A loss that compares tensors element by element."""
    given = _bound(call)
    reduction = given["reduction"]
    if reduction == "none":
        return elementwise(call)
    is_divided_by_weights = reduction == "mean" and call.name not in _MEANS_OVER_ALL
    call.require(not is_divided_by_weights or given.get("weight") is None)
    given["reduction"] = "none"
    sizes = torch.broadcast_shapes(*(value.shape for value in call.values))  # type: ignore[no-untyped-call,unused-ignore]
    example = call.example.new_empty(sizes)
    one_by_one = Call(
        call.folded, call.node, call.name, (), given, example, writes=False
    )
    losses = elementwise(one_by_one)
    if reduction == "batchmean":
        total = _reduced(call, losses, "sum")
        rows = given["input"].shape[0]
        return call.result(call.folded.method("div", total.node, rows), STACKED)
    return _reduced(call, losses, reduction)


_MEANS_OVER_ALL = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
"""Losses whose weighted mean is one over all elements, whatever the weights add up to.
"""


def identity_loss(call: Call) -> Any:
    """The mark of a loss."""
    value = call.value(0, "x")
    reduction = call.get(1, "reduction")
    if reduction == "none":
        return elementwise(call)
    return _reduced(call, value, reduction)


def _reduced(call: Call, losses: Value, reduction: str) -> Any:
    call.require(reduction in ("sum", "mean") and losses.place != SHARED)
    function: Callable[..., Any] = torch.sum if reduction == "sum" else torch.mean
    node: Node = call.folded.function(function, call.folded.flat(losses), 1)
    return call.result(node, STACKED)


def _bound(call: Call) -> dict[str, Any]:
    """The arguments by name, with the defaults."""
    target: Any = call.node.target
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # a function of C without one
        call.refuse()
    bound = signature.bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    call.require("reduction" in given)
    for name in ("size_average", "reduce"):
        call.require(given.get(name) is None)
    return given
