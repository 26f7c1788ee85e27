# SPDX-License-Identifier: Apache-2.0
"""Rules of the types of numbers: what Poplar computes in which type."""

from __future__ import annotations

import math
from typing import Any, Iterator

import torch
from torch import Tensor

from ..float16 import to_half, unrounded_function
from ..operators import Call, row, rule
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
_ARITHMETIC = (
    *_forms("add", "sub", "mul", "mod", "pow"),
    *("subtract", "rsub", "multiply", "square", "fmod", "remainder"),
    *("clamp", "clip", "clamp_min", "clamp_max"),
)
_OF_FLOATS = """
    exp expm1 log log1p log2 log10 sin cos tan sinh cosh tanh asin acos atan arcsin
    arccos arctan asinh acosh atanh arcsinh arccosh arctanh sigmoid erf erfc relu
    """.split()  # noqa: SIM905 - one per line would be longer


def _type_of(call: Call) -> torch.dtype:
    """Return the type to which the operands are promoted."""
    x, other = call.args[:2]
    return torch.result_type(x, other)


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


row("compare-narrow", _COMPARISONS, lambda call: _type_of(call) in _NARROW)
row("equal-8-bit", _EQUALITIES, lambda call: _type_of(call) in _8_BIT)
row("arithmetic-narrow", _ARITHMETIC, lambda call: call.result.dtype in _NARROW)


@rule("arithmetic-narrow", "maximum", "minimum", "max", "min")
def arithmetic_narrow_of_two(call: Call) -> Any:
    is_of_two = len(call.tensors()) == 2
    return is_of_two and call.result.dtype in (*_NARROW, torch.bool)


row("select-narrow", "where masked_fill", lambda call: call.result.dtype in _NARROW)


@rule("where-uint8-mask", "where", "masked_fill", is_certain=False)
def where_uint8_mask(call: Call) -> Any:
    masks = [t for t in call.args if isinstance(t, Tensor)]
    place = 0 if call.function is torch.where else 1
    return any(mask.dtype == torch.uint8 for mask in masks[place : place + 1])


row("floats-of-whole", _OF_FLOATS, lambda call: call.is_whole)
row("rounding-of-whole", "floor ceil round", lambda call: call.is_whole)


@rule("sqrt-whole", "sqrt")
def sqrt_whole(call: Call) -> Any:
    return call.is_whole and (lambda input: torch.sqrt(input).trunc())


@rule("rsqrt-whole", "rsqrt")
def rsqrt_whole(call: Call) -> Any:
    def rsqrt(input: Tensor) -> Tensor:
        return torch.sqrt(input).trunc().reciprocal().trunc()

    return call.is_whole and rsqrt


row("isnan-whole", "isnan", lambda call: call.is_whole)


@rule("sign-narrow", "abs", "absolute", "neg", "negative", "sign", "__abs__", "__neg__")
def sign_narrow(call: Call) -> Any:
    return call.result.dtype in _NARROW


@rule("logical-of-numbers", "logical_not", "logical_and", "logical_or")
def logical_of_numbers(call: Call) -> Any:
    return any(tensor.dtype != torch.bool for tensor in call.tensors())


@rule("bitwise-8-bit", *_BITWISE, "__invert__", "bitwise_not", topic="arguments")
def bitwise_8_bit(call: Call) -> Any:
    operands = (*call.args, *call.kwargs.values())
    types = {x.dtype if isinstance(x, Tensor) else int for x in operands}
    return types <= {*_8_BIT} and (
        f"{call.written}: Poplar does not support binary operations on 8-bit integral "
        "types. Cast to torch.int32, or to torch.bool."
    )


@rule("bitwise-8-bit-number", *_BITWISE)
def bitwise_8_bit_number(call: Call) -> Any:
    return len(call.tensors()) == 1 and call.result.dtype in _8_BIT


@rule(
    "number-beyond-int32",
    *(*_COMPARISONS, *_EQUALITIES),
    *("masked_fill", "clamp", "clip", "clamp_min", "clamp_max"),
    is_certain=False,
)
def number_beyond_int32(call: Call) -> Any:
    numbers = [v for v in (*call.args, *call.kwargs.values()) if type(v) is int]
    return any(not -(2**31) <= n < 2**31 and n != 2**63 - 1 for n in numbers)


@rule("masked-fill-bool", "masked_fill")
def masked_fill_bool(call: Call) -> Any:
    value = call.arguments["value"]
    return call.result.dtype == torch.bool and not isinstance(value, Tensor)


@rule("masked-fill-fraction", "masked_fill")
def masked_fill_fraction(call: Call) -> Any:
    value = call.arguments["value"]
    is_copy = not call.is_in_place and _is_whole(call.result)
    if not is_copy or not isinstance(value, float):
        return None
    return lambda input, mask, value: torch.where(mask, value, input)


@rule("masked-fill-whole-in-place", "masked_fill", is_certain=False)
def masked_fill_whole_in_place(call: Call) -> Any:
    is_copying = call.is_in_place or len(call.tensors()) == 3
    is_int32 = call.result.dtype in (torch.int32, torch.int64)
    return is_copying and is_int32


@rule("sort-narrow", "sort", "msort")
@rule("topk-narrow", "topk")
def sort_narrow(call: Call) -> Any:
    return call.tensors()[0].dtype in (*_NARROW, torch.bool)


@rule("scatter-narrow", "scatter", "scatter_add", "index_fill")
def scatter_narrow(call: Call) -> Any:
    return call.is_in_place and call.result.dtype in _NARROW


@rule("bfloat16-or-complex", "to", "type", "type_as", "bfloat16", "complex", "polar")
def bfloat16_or_complex(call: Call) -> Any:
    result = call.result
    return result.dtype == torch.bfloat16 or result.is_complex()


# Operands beside float16: these rules replace what those of `elementwise` have made

_PRODUCTS = (*_forms("mul"), *DIVISIONS, "multiply", "__rdiv__", "__rtruediv__")
_OF_HALF = (
    *(*_PRODUCTS, *FLOOR_DIVISIONS, *REMAINDERS, *_COMPARISONS, *_EQUALITIES),
    *(*_forms("add", "sub", "pow"), "subtract", "rsub", "fmod", "atan2"),
    *("hinge_embedding_loss", "softshrink", "threshold"),
)


def _narrowed(call: Call) -> dict[int | str, float | None]:
    """Return the operands that PopTorch casts to float16, by their place or name.

    A number comes as it is in float16 if that is another number; a tensor as None. To
    PopTorch a number is a tensor without dimensions of float32 or int32.
    """
    given: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
    operands = {
        key: torch.as_tensor(
            value, dtype=torch.float32 if type(value) is float else None
        )
        for key, value in given.items()
        if isinstance(value, Tensor) or type(value) in (int, float)
    }
    x, other = [*operands.values(), *operands.values()][:2]
    promoted = x.dtype if call.is_in_place else torch.result_type(x, other)
    if promoted != torch.float16:
        return {}
    return {
        key: None if isinstance(given[key], Tensor) else tensor.half().item()
        for key, tensor in operands.items()
        if tensor.dtype not in (torch.float16, torch.bool)
        and (isinstance(given[key], Tensor) or tensor.half() != tensor)
    }


@rule("half-operand", *_OF_HALF, is_reported=False)
def half_operand(call: Call) -> Any:
    narrowed = _narrowed(call)
    if not narrowed or call.node is None:
        return None
    function = unrounded_function(call.node)

    def compute(*args: Any, **kwargs: Any) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for key, number in narrowed.items():
            is_tensor = number is None
            given[key] = to_half(given[key].float()).float() if is_tensor else number
        return function(
            *map(given.get, range(len(args))), **{k: given[k] for k in kwargs}
        )

    return compute


@rule("half-number-lost", *_PRODUCTS)
def half_number_lost(call: Call) -> Any:
    return any(
        number in (0.0, math.inf, -math.inf) for number in _narrowed(call).values()
    )
