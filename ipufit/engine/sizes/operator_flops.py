# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of torch's operators, from the shapes of their tensors.

The numbers are those of `torch.utils.flop_counter` (torch 2.1 and later), which counts
a multiplication and an addition as two, and elementwise operators as nothing. Torch 2.0
has no such counter. Beyond torch's, fused attention of processors and products with
vectors are counted.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any, Callable, Mapping, Sequence

from torch import Tensor

Formula = Callable[[Sequence[Any], Any], int]
"""Counts from the arguments by place, and the result."""


def _product(left: int, right: int) -> Formula:
    """A matrix product of two arguments, of which the first may be a batch."""

    def formula(args: Sequence[Any], _result: Any) -> int:
        columns = args[right].shape[-1] if args[right].dim() > 1 else 1
        return 2 * int(args[left].numel()) * int(columns)

    return formula


def _convolution(args: Sequence[Any], result: Any) -> int:
    inputs, weight, is_transposed = args[0], args[1], args[6]
    places = inputs if is_transposed else result
    return 2 * _places(places) * int(weight.numel())


def _own_convolution(args: Sequence[Any], result: Any) -> int:
    return 2 * _places(result) * int(args[1].numel())


def _places(images: Tensor) -> int:
    """Samples times the places of each, without its channels."""
    return prod(map(int, (images.shape[0], *images.shape[2:])))


def _attention(args: Sequence[Any], _result: Any) -> int:
    query, key, value = args[:3]
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * int(pairs) * (int(query.shape[-1]) + int(value.shape[-1]))


FORMULAS: Mapping[str, Formula] = {
    "mm": _product(0, 1),
    "bmm": _product(0, 1),
    "mv": _product(0, 1),
    "dot": _product(0, 1),
    "addmm": _product(1, 2),
    "baddbmm": _product(1, 2),
    "addmv": _product(1, 2),
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_overrideable": _convolution,
    "mkldnn_convolution": _own_convolution,
    "_slow_conv2d_forward": _own_convolution,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
}
"""Operators of torch that are counted, by their names without the overload."""

_COSTLY = re.compile(
    r"(^|_)(b?mm|addbmm|mv|dot|ger|matmul|linear|conv\w*|attention|rnn|gru|lstm"
    r"|fft|linalg|cdist|pdist|trilinear)(_|\d|$)"
)
_ELEMENTWISE = re.compile(r"_thnn_fused_|_conj|convert")


def flops_of(operator: Any, args: Sequence[Any], result: Any) -> int | None:
    """Count the floating-point operations of an operator.

    Args:
        operator: An operator of torch, such as `torch.ops.aten.mm.default`.
        args: Its arguments by place; only the shapes of tensors count.
        result: Its result.

    Returns:
        0 for operators that count nothing; None for one that computes much, or may,
        and has no formula.

    Example:
        >>> import torch
        >>> left, right = torch.empty(2, 3), torch.empty(3, 5)
        >>> flops_of(torch.ops.aten.mm.default, (left, right), None)
        60
        >>> flops_of(torch.ops.aten.relu.default, (left,), left)
        0
    """
    space, _, name = operator._schema.name.partition("::")
    if space not in ("aten", "prim", "prims"):
        return None if isinstance(result, Tensor) else 0
    formula = FORMULAS.get(name)
    if formula is not None:
        return formula(args, result)
    is_costly = _COSTLY.search(name) and not _ELEMENTWISE.search(name)
    return None if is_costly else 0


def operator_name(operator: Any) -> str:
    """The name of an operator as torch writes it.

    Example:
        >>> import torch
        >>> operator_name(torch.ops.aten.mm.default)
        'aten::mm'
    """
    return str(operator._schema.name)
