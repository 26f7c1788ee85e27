# SPDX-License-Identifier: Apache-2.0
"""Rules of the types of numbers: what Poplar computes in which type."""

from __future__ import annotations

import math
from typing import Any, Iterator

import torch
from torch import Tensor

from ..float16 import to_half, unrounded_function
from ..operators import Call, row
from .elementwise import DIVISIONS, FLOOR_DIVISIONS, REMAINDERS

_8_BIT = torch.uint8, torch.int8
_NARROW = (*_8_BIT, torch.int16)


def _forms(*names: str) -> Iterator[str]:
    """Yield the names of functions, and of Python's methods for operators."""
    for name in names:
        yield from (name, f"__{name}__", f"__r{name}__", f"__i{name}__")


_COMPARISONS = (
    *_forms("gt", "lt", "ge", "le"),
    *("greater", "less", "greater_equal", "less_equal"),
)
_EQUALITIES = (*_forms("eq", "ne"), "not_equal")
_BITWISE = (*_forms("and", "or", "xor"), "bitwise_and", "bitwise_or", "bitwise_xor")
_CLAMPS = "clamp", "clip", "clamp_min", "clamp_max"
_ARITHMETIC = (
    *_forms("add", "sub", "mul", "mod", "pow"),
    *("subtract", "rsub", "multiply", "square", "fmod", "remainder", *_CLAMPS),
)
_OF_FLOATS = """
    exp expm1 log log1p log2 log10 sin cos tan sinh cosh tanh asin acos atan arcsin
    arccos arctan asinh acosh atanh arcsinh arccosh arctanh sigmoid erf erfc relu
"""
_CASTS = "to type type_as bfloat16 cfloat cdouble chalf complex polar view_as_complex"
_SIGNS = "abs absolute neg negative sign __abs__ __neg__"


def _type_of(call: Call) -> torch.dtype:
    """Return the type to which the operands are promoted."""
    return torch.result_type(*call.args[:2])


row("compare-narrow", _COMPARISONS, lambda call: _type_of(call) in _NARROW)
row("equal-8-bit", _EQUALITIES, lambda call: _type_of(call) in _8_BIT)
row("arithmetic-narrow", _ARITHMETIC, lambda call: call.result.dtype in _NARROW)


@row("arithmetic-narrow", "maximum minimum max min")
def arithmetic_narrow_of_two(call: Call) -> Any:
    is_of_two = len(call.tensors) == 2
    return is_of_two and call.result.dtype in (*_NARROW, torch.bool)


row("select-narrow", "where masked_fill", lambda call: call.result.dtype in _NARROW)


@row("where-uint8-mask", "where masked_fill")
def where_uint8_mask(call: Call) -> Any:
    masks = [t for t in call.args if isinstance(t, Tensor)]
    place = 0 if call.function is torch.where else 1
    return any(mask.dtype == torch.uint8 for mask in masks[place : place + 1])


row("floats-of-whole", _OF_FLOATS, lambda call: call.is_whole)
row("rounding-of-whole", "floor ceil round", lambda call: call.is_whole)


@row("sqrt-whole", "sqrt")
def sqrt_whole(call: Call) -> Any:
    return call.is_whole and (lambda input: torch.sqrt(input).trunc())


@row("rsqrt-whole", "rsqrt")
def rsqrt_whole(call: Call) -> Any:
    return call.is_whole and (
        lambda input: torch.sqrt(input).trunc().reciprocal().trunc()
    )


row("isnan-whole", "isnan", lambda call: call.is_whole)
row("sign-narrow", _SIGNS, lambda call: call.result.dtype in _NARROW)


@row("logical-of-numbers", "logical_not logical_and logical_or")
def logical_of_numbers(call: Call) -> Any:
    return any(tensor.dtype != torch.bool for tensor in call.tensors)


@row("bitwise-8-bit", (*_BITWISE, "__invert__", "bitwise_not"), topic="arguments")
def bitwise_8_bit(call: Call) -> Any:
    operands = (*call.args, *call.kwargs.values())
    types = {x.dtype if isinstance(x, Tensor) else int for x in operands}
    return types <= {*_8_BIT}


@row("bitwise-8-bit-number", _BITWISE)
def bitwise_8_bit_number(call: Call) -> Any:
    return len(call.tensors) == 1 and call.result.dtype in _8_BIT


@row("number-beyond-int32", (*_COMPARISONS, *_EQUALITIES, "masked_fill", *_CLAMPS))
def number_beyond_int32(call: Call) -> Any:
    numbers = [v for v in (*call.args, *call.kwargs.values()) if type(v) is int]
    return any(not -(2**31) <= n < 2**31 and n != 2**63 - 1 for n in numbers)


@row("masked-fill-bool", "masked_fill")
def masked_fill_bool(call: Call) -> Any:
    return call.result.dtype == torch.bool and not isinstance(call.get("value"), Tensor)


@row("masked-fill-fraction", "masked_fill")
def masked_fill_fraction(call: Call) -> Any:
    is_of_floats = call.result.is_floating_point() or call.result.is_complex()
    is_fraction = isinstance(call.get("value"), float) and not is_of_floats
    return (is_fraction and not call.is_in_place) and (
        lambda input, mask, value: torch.where(mask, value, input)
    )


@row("masked-fill-whole-in-place", "masked_fill")
def masked_fill_whole_in_place(call: Call) -> Any:
    is_copying = call.is_in_place or len(call.tensors) == 3
    return is_copying and call.result.dtype in (torch.int32, torch.int64)


@row("sort-narrow", "sort msort")
def sort_narrow(call: Call) -> Any:
    return call.first.dtype in (*_NARROW, torch.bool)


@row("topk-narrow", "topk argsort max min")
def topk_narrow(call: Call) -> Any:
    is_topk = call.name not in ("max", "min") or call.get("dim") is not None
    return is_topk and sort_narrow(call)


@row("scatter-narrow", "scatter scatter_add index_fill")
def scatter_narrow(call: Call) -> Any:
    return call.is_in_place and call.result.dtype in _NARROW


@row("bfloat16-or-complex", _CASTS)
def bfloat16_or_complex(call: Call) -> Any:
    return call.result.dtype == torch.bfloat16 or call.result.is_complex()


# Operands beside float16: these rules replace what those of `elementwise` have made

_PRODUCTS = (*_forms("mul"), *DIVISIONS.split(), "multiply", "__rdiv__", "__rtruediv__")
_OF_HALF = (
    *(*_PRODUCTS, *FLOOR_DIVISIONS.split(), *REMAINDERS.split()),
    *(*_COMPARISONS, *_EQUALITIES, *_forms("add", "sub", "pow")),
    *("subtract", "rsub", "fmod", "atan2"),
    *("hinge_embedding_loss", "softshrink", "threshold"),
)


def _narrowed(call: Call) -> dict[int | str, float | None]:
    """Return the operands that PopTorch casts to float16, by their place or name.

    A number comes as it is in float16 if that is another number; a tensor as None. To
    PopTorch a number is a tensor without dimensions of float32 or int32.
    """
    arguments: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
    operands = {
        key: torch.as_tensor(
            value, dtype=torch.float32 if type(value) is float else None
        )
        for key, value in arguments.items()
        if isinstance(value, Tensor) or type(value) in (int, float)
    }
    x, other = [*operands.values(), *operands.values()][:2]
    promoted = x.dtype if call.is_in_place else torch.result_type(x, other)
    if promoted != torch.float16:
        return {}
    return {
        key: None if isinstance(arguments[key], Tensor) else tensor.half().item()
        for key, tensor in operands.items()
        if tensor.dtype not in (torch.float16, torch.bool)
        and (isinstance(arguments[key], Tensor) or tensor.half() != tensor)
    }


@row("half-operand", _OF_HALF, is_reported=False)
def half_operand(call: Call) -> Any:
    narrowed = _narrowed(call)
    if not narrowed or call.node is None:
        return None
    function = unrounded_function(call.node)

    def compute(*args: Any, **kwargs: Any) -> Any:
        operands: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for key, number in narrowed.items():
            operands[key] = (
                to_half(operands[key].float()).float() if number is None else number
            )
        return function(
            *map(operands.get, range(len(args))), **{k: operands[k] for k in kwargs}
        )

    return compute


_LOSSES_OF_NUMBERS = """
    smooth_l1_loss margin_ranking_loss triplet_margin_loss cosine_embedding_loss
    """
row("half-loss-type", _LOSSES_OF_NUMBERS, lambda call: call.is_half)


@row("half-product-type", "baddbmm")
def half_product_type(call: Call) -> bool:
    return call.is_half and type(call.get("alpha")) is float


@row("half-number-lost", _PRODUCTS)
def half_number_lost(call: Call) -> Any:
    return any(
        number in (0.0, math.inf, -math.inf) for number in _narrowed(call).values()
    )
