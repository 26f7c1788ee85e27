# SPDX-License-Identifier: Apache-2.0
"""Functions that the device computes otherwise than torch does.

Where what it computes is certain, the program does the same. Where it is likely wrong
or refused by a later compiler, the emulator refuses it. Constants are computed by torch
(PopTorch, `EvaluateConstexprs.cpp`), so they are as they are.
"""

from __future__ import annotations

from typing import Any, Callable, Collection, Iterable

import numpy as np
import torch
from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.node import Node

from ipufit.emulator._tracing.constant_nodes import function_name
from ipufit.emulator._tracing.operands import tensors_in
from ipufit.emulator.errors import createPoptorchError

_IS_WHOLE = "is_whole"
_DIVISIONS = frozenset(
    """
    __idiv__ __itruediv__ __truediv__ div div_ divide divide_ true_divide true_divide_
    """.split()  # noqa: SIM905 - one per line would be a page
)
_FLOOR_DIVISIONS = frozenset(
    """
    __floordiv__ __ifloordiv__ __rfloordiv__ floor_divide floor_divide_
    """.split()  # noqa: SIM905
)
_SPREADS = frozenset({"std", "std_mean", "var", "var_mean"})


def note_whole_numbers(node: Node, operands: Iterable[Any]) -> None:
    """Note in a node whether all that it computes with are whole numbers.

    Example:
        >>> node = Graph().placeholder("x")
        >>> note_whole_numbers(node, [torch.tensor(1), 2])
        >>> node.meta["is_whole"]
        True
    """
    node.meta[_IS_WHOLE] = not any(
        isinstance(operand, (float, complex, np.floating))
        or any(t.is_floating_point() or t.is_complex() for t in tensors_in(operand))
        for operand in operands
    )


def compute_as_device(graph: Graph, constants: Collection[Node]) -> None:
    """Refuse operations a device likely gets wrong; replace those known to differ.

    Args:
        graph: A traced program, which is changed.
        constants: Its constant nodes; torch computes those.

    Raises:
        Error: The program divides whole numbers, divides with a rounding mode, or takes
            the mean of whole numbers.

    Example:
        >>> graph = Graph()
        >>> node = graph.call_function(torch.trunc, (graph.placeholder("x"),))
        >>> compute_as_device(graph, constants=())
        >>> node.target(torch.tensor([2.7, 1e10]))
        tensor([ 2.0000e+00, -2.1475e+09])
    """
    for node in graph.nodes:
        if node in constants or node.op not in ("call_function", "call_method"):
            continue
        check_numbers(node)
        name = function_name(node)
        if name in _SPREADS:
            _correct_by_one(node)
        elif name in _THROUGH_INT32:
            node.op, node.target = "call_function", _THROUGH_INT32[name]


def check_numbers(node: Node) -> None:
    """Refuse a node of which a device likely computes something else.

    Args:
        node: A node that isn't constant.

    Raises:
        Error: As from `compute_as_device`.
    """
    name = function_name(node)
    if name in _DIVISIONS or name in _FLOOR_DIVISIONS:
        _check_division(node, name)
    elif name == "mean" and node.meta.get(_IS_WHOLE):
        raise _whole("the mean of whole numbers", "x.float().mean()")


def other_numbers(node: Node) -> str:
    """The difference between a device's numbers and torch's, in words; "" for none.

    Args:
        node: A node that isn't constant and compiles.
    """
    name = function_name(node)
    correction = node.kwargs.get("correction")
    if name in _SPREADS and correction not in (None, 0, 1, True, False):
        return (
            f"{name}(correction={correction}) is computed with a correction of 1: "
            "PopTorch takes the number for a truth value (`calculateVarMean`)."
        )
    if name in _THROUGH_INT32:
        return (
            f"torch.{name} goes through int32 (`truncHandler`): values of 2**31 and "
            "more come out wrong."
        )
    return ""


def _check_division(node: Node, name: str) -> None:
    if name in _FLOOR_DIVISIONS:
        if node.meta.get(_IS_WHOLE):
            raise _whole("`//` of whole numbers", "torch.floor(x.float() / y)")
        return
    rounding = node.kwargs.get("rounding_mode")
    if rounding is not None:
        raise createPoptorchError(
            f"torch.div with rounding_mode={rounding!r}: PopTorch ignores the mode "
            f"(`AtenHandlers.gen.cpp`). Write torch.{rounding}(x.float() / y)."
        )
    if node.meta.get(_IS_WHOLE):
        raise _whole("division of whole numbers", "x.float() / y")


def _whole(what: str, way: str) -> Exception:
    return createPoptorchError(
        f"{what[:1].upper()}{what[1:]}: the device computes it in int32, truncated, or "
        "refuses to, where torch computes in floats. Convert first, for example "
        f"{way}; a share of matches is `(a == b).float().mean()`."
    )


def _correct_by_one(node: Node) -> None:
    """Take a correction for a truth value, as PopTorch does (`calculateVarMean`)."""
    correction = node.kwargs.get("correction")
    if correction is not None:
        node.kwargs = {**node.kwargs, "correction": int(bool(correction))}


def trunc(x: Tensor) -> Tensor:
    """torch.trunc through int32, as PopTorch's `truncHandler` computes it."""
    through_int32 = x.detach().to(torch.int32).to(x.dtype)
    return torch.where(x.abs() < 2.0**31, torch.trunc(x), through_int32)


def frac(x: Tensor) -> Tensor:
    """torch.frac through int32, as PopTorch's `fracHandler` computes it."""
    result: Tensor = x - x.detach().to(torch.int32).to(x.dtype)
    return result


_THROUGH_INT32: dict[str, Callable[[Tensor], Tensor]] = {
    "fix": trunc,
    "frac": frac,
    "trunc": trunc,
}
