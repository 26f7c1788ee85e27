# SPDX-License-Identifier: Apache-2.0
"""Which operations give the same bits for one micro-batch as for several at once.

A fold is equal up to rounding: sums of many numbers come in another order. Operations
that move, compare or count have no rounding; arithmetic on single elements rounds each
alike. Sums are exact where their terms are small whole numbers, such as hits.
"""

from __future__ import annotations

import math
from typing import Any, Mapping

import torch
from torch import Tensor
from torch.fx.node import Node

from ipufit.emulator._folding.example_run import NodeRecord
from ipufit.emulator._tracing.constant_nodes import function_name
from ipufit.emulator._tracing.half import original

_LARGEST_WHOLE = 2**24
"""Whole numbers up to this one have no rounding in float32."""

_MOVES = frozenset(
    """
    __getitem__ alias bool cat clone concat concatenate contiguous detach expand
    expand_as flatten flip float getitem int long movedim narrow permute reshape
    reshape_as select squeeze stack t to transpose type_as unflatten unsqueeze view
    view_as
    """.split()  # noqa: SIM905 - one per line would be a page
)
_COMPARISONS = frozenset(
    """
    __and__ __eq__ __ge__ __gt__ __invert__ __le__ __lt__ __ne__ __or__ __xor__ all any
    argmax argmin eq ge gt isfinite isinf isnan le logical_and logical_not logical_or
    logical_xor lt ne
    """.split()  # noqa: SIM905 - as above
)
_ARITHMETIC = frozenset(
    """
    __add__ __mul__ __radd__ __rmul__ __sub__ __truediv__ abs add clamp div mul neg sub
    """.split()  # noqa: SIM905 - as above
)
_FILLS = frozenset({"full", "ones", "zeros"})
_OTHERS = frozenset({"identity_loss", "sum", "topk", "where"})
_KNOWN = _MOVES | _COMPARISONS | _ARITHMETIC | _FILLS | _OTHERS


def exact_nodes(records: Mapping[Node, NodeRecord]) -> set[Node]:
    """Find the operations that are exact, however many micro-batches they run for.

    Args:
        records: How each node of a program behaves, in the program's order.

    Example:
        >>> from ipufit.emulator._folding.example_run import run_example
        >>> program = torch.fx.symbolic_trace(lambda x: (x.gt(0).sum(), x.sum()))
        >>> records = run_example(program, [torch.ones(3)], is_grad_enabled=False)
        >>> sorted(node.name for node in exact_nodes(records))
        ['gt', 'sum_1']
    """
    largest: dict[Node, float] = {}
    exact: set[Node] = set()
    for node, record in records.items():
        largest[node] = _largest_whole(node, record.value, records, largest)
        if _is_exact(node, record, records, largest):
            exact.add(node)
    return exact


def is_of_one_element(node: Node, records: Mapping[Node, NodeRecord]) -> bool:
    """Whether a node marks a loss of one element, and so has nothing to add up."""
    is_rounded = original(node.target) is not node.target
    if function_name(node) != "identity_loss" or is_rounded:
        return False
    return bool(records[node.all_input_nodes[0]].value.numel() == 1)


def _is_exact(
    node: Node,
    record: NodeRecord,
    records: Mapping[Node, NodeRecord],
    largest: Mapping[Node, float],
) -> bool:
    name = function_name(node)
    if node.op not in ("call_function", "call_method") or name not in _KNOWN:
        return False
    if original(node.target) is not node.target or record.is_random or record.written:
        return False
    if name in _ARITHMETIC:  # in other words none that multiplies and adds at once
        is_plain = len(node.args) <= 2 and "alpha" not in node.kwargs
        return is_plain and not node.kwargs.get("rounding_mode")
    if name == "identity_loss":
        return is_of_one_element(node, records)
    if name != "sum":
        return True
    of = records[node.all_input_nodes[0]].value
    is_float = of.is_floating_point() or record.value.is_floating_point()
    return not is_float or largest[node] <= _LARGEST_WHOLE


def _largest_whole(
    node: Node,
    value: Any,
    records: Mapping[Node, NodeRecord],
    largest: Mapping[Node, float],
) -> float:
    """The largest magnitude of a tensor of whole numbers; infinite for other ones."""
    if not isinstance(value, Tensor):
        return math.inf
    if value.dtype == torch.bool:
        return 1.0
    name = function_name(node)
    operands = [largest[one] for one in node.all_input_nodes]
    if node.op not in ("call_function", "call_method"):
        return math.inf
    if name in _FILLS:
        return _largest_fill(name, node)
    if name in _MOVES:
        return max(operands, default=math.inf)
    if name == "sum" and operands:
        terms: int = records[node.all_input_nodes[0]].value.numel()
        return float(operands[0] * terms / max(1, value.numel()))
    if name == "clamp":
        given = (*node.args[1:], *node.kwargs.values())
        return max([*operands, *(_whole(x) for x in given if x is not None)])
    return math.inf


def _largest_fill(name: str, node: Node) -> float:
    if name != "full":
        return 1.0
    return _whole(node.args[1] if len(node.args) > 1 else node.kwargs["fill_value"])


def _whole(value: object) -> float:
    """The magnitude of a whole number; infinite of anything else."""
    is_whole = isinstance(value, (int, float)) and float(value).is_integer()
    return abs(float(value)) if is_whole else math.inf  # type: ignore[arg-type]
