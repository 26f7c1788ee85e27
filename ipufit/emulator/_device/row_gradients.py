# SPDX-License-Identifier: Apache-2.0
"""Gradients of large tables, while an update accumulates: the rows looked up only.

The gradient of an embedding's table is zero in all rows but those of the tokens of a
micro-batch. torch makes a whole table of zeros for it, and adds that to the table that
it has from earlier micro-batches. Here each micro-batch leaves its rows, and the whole
table is made once, at the end.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from torch import Tensor
from torch.fx.graph_module import GraphModule
from torch.fx.node import Node
from torch.nn.functional import embedding

from ipufit.emulator._device.segments import Function
from ipufit.emulator._ground.rewriting import rewritten

_ops: Any = getattr(torch, "ops")  # noqa: B009 - torch doesn't export it to mypy
_gradient_of_rows: Callable[..., Tensor] = _ops.aten.embedding_dense_backward
_LARGEST_PART = 0.25  # of the rows of a table, to keep apart from it
_NAMES = (
    *("input", "weight", "padding_idx", "max_norm"),
    *("norm_type", "scale_grad_by_freq", "sparse"),
)
# Arguments of `embedding`, with the values that make it a plain look-up.
_PLAIN = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}


class Table:
    """The gradient of a weight that one `embedding` alone reads.

    It is made of the sums that torch computes, in the same order: no bit is another.

    Args:
        padding: The row that gets no gradient, or None.

    Example:
        >>> weight = torch.ones(5, 2, requires_grad=True)
        >>> table = Table(None)
        >>> for tokens in (torch.tensor([1, 3, 3]), torch.tensor([3])):
        ...     table.look_up(tokens, weight).sum().backward()
        >>> weight.grad is None
        True
        >>> table.take(weight)[:, 0]
        tensor([0., 1., 0., 3., 0.])
    """

    def __init__(self, padding: int | None) -> None:
        self._padding = padding
        self.forget()

    def forget(self) -> None:
        """Drop the gradient."""
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._num_kept = 0
        self._whole: Tensor | None = None

    def look_up(self, indices: Tensor, weight: Tensor) -> Tensor:
        """Do what `embedding` does, but keep the gradient of the weight here."""
        result: Tensor = _LookUp.apply(weight, indices, self)  # type: ignore[no-untyped-call,unused-ignore]
        return result

    @torch.no_grad()
    def add(self, indices: Tensor, gradient: Tensor, weight: Tensor) -> None:
        """Add the gradient of what was looked up."""
        rows, places = torch.unique(indices, return_inverse=True)
        padding = self._place_of_padding(rows, weight)
        values = _gradient_of_rows(gradient, places, len(rows), padding, False)
        self._kept.append((rows.long(), values))
        self._num_kept += len(rows)
        if self._num_kept > len(weight) * _LARGEST_PART:
            self._add_kept(weight)

    def _place_of_padding(self, rows: Tensor, weight: Tensor) -> int:
        if self._padding is None:
            return -1
        found = torch.nonzero(rows.eq(self._padding % len(weight)))
        return int(found) if len(found) else -1

    @torch.no_grad()
    def take(self, weight: Tensor) -> Tensor | None:
        """Give the gradient of the whole weight, and forget it; None without any."""
        if self._kept:
            self._add_kept(weight)
        whole = self._whole
        self.forget()
        return whole

    def _add_kept(self, weight: Tensor) -> None:
        if self._whole is None:
            self._whole = torch.zeros_like(weight, requires_grad=False)
        for rows, values in self._kept:
            sums = self._whole.index_select(0, rows).add_(values)
            self._whole.index_copy_(0, rows, sums)
        self._kept = []


class _LookUp(torch.autograd.Function):
    """`embedding`, whose gradient goes to a `Table`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, table: Table) -> Tensor:
        ctx.save_for_backward(indices, weight)
        ctx.table = table
        return embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        indices, weight = ctx.saved_tensors
        ctx.table.add(indices, gradient, weight)
        return None, None, None


def with_tables(
    function: Function, is_large: Sequence[bool]
) -> tuple[Function, dict[int, Table]]:
    """Copy a program, so that the gradients of its large tables are kept by rows.

    Args:
        function: The `forward` of a program, which takes the weights first.
        is_large: For each weight whether it may be a large table.

    Returns:
        The copy, and its tables by the index of their weight; the program itself if it
        has none.
    """
    module: GraphModule = function.__self__  # type: ignore[attr-defined]
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    found: dict[str, Table] = {}  # by the name of the operation that looks up
    tables: dict[int, Table] = {}
    for index, (node, may_be) in enumerate(zip(inputs, is_large)):
        users = list(node.users)
        if may_be and len(users) == 1 and _looks_up(users[0], node):
            table = Table(_arguments(users[0]).get("padding_idx"))
            found[users[0].name] = tables[index] = table

    def keep_rows(node: Node) -> None:
        given = _arguments(node)
        node.target = found[node.name].look_up
        node.args, node.kwargs = (given["input"], given["weight"]), {}

    copy = rewritten(module, lambda node: node.name in found, keep_rows)
    return copy.forward, tables


def _looks_up(node: Node, weight: Node) -> bool:
    """Whether an operation looks rows up in a weight, and does nothing else to it."""
    if node.target is not embedding:
        return False
    given = _arguments(node)
    is_plain = all(given.get(name, value) == value for name, value in _PLAIN.items())
    padding = given.get("padding_idx")
    return (
        is_plain
        and given.get("weight") is weight
        and isinstance(given.get("input"), Node)
        and (padding is None or isinstance(padding, int))
    )


def _arguments(node: Node) -> dict[str, Any]:
    return {**dict(zip(_NAMES, node.args)), **node.kwargs}
