# SPDX-License-Identifier: Apache-2.0
"""Rules of arithmetic, comparisons and functions of single elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..operators import Call, row, rule

DIVISIONS = "div", "divide", "true_divide", "__truediv__", "__itruediv__", "__idiv__"
FLOOR_DIVISIONS = "floor_divide", "__floordiv__", "__ifloordiv__", "__rfloordiv__"
REMAINDERS = "remainder", "__mod__", "__imod__", "__rmod__"


def of_whole_numbers(what: str, way: str) -> str:
    """Refuse an operation on whole numbers, of which torch makes a fraction."""
    return (
        f"{what} of whole numbers: the device computes it in int32, truncated, or "
        "refuses to, where torch computes in floats. Convert first, for example "
        f"{way}; a share of matches is `(a == b).float().mean()`."
    )


@rule("div-rounding-mode", *DIVISIONS)
def div_rounding_mode(call: Call) -> Any:
    mode = call.kwargs.get("rounding_mode")
    if mode is None:
        return None
    return (
        f"torch.div with rounding_mode={mode!r}: PopTorch ignores the mode "
        f"(`AtenHandlers.gen.cpp`). Write torch.{mode}(x.float() / y)."
    )


@rule("div-whole", *DIVISIONS)
def div_whole(call: Call) -> Any:
    return call.is_whole and of_whole_numbers("Division", "x.float() / y")


@rule("div-half-gradient", *DIVISIONS, "reciprocal", "__rdiv__", "__rtruediv__")
def div_half_gradient(call: Call) -> Any:
    is_first = call.name in ("reciprocal", "__rdiv__", "__rtruediv__")
    divisor = call.args[0] if is_first else call.arguments["other"]
    is_half = isinstance(divisor, Tensor) and divisor.dtype == torch.float16
    return call.trains and is_half and divisor.requires_grad


@rule("floor-divide-whole", *FLOOR_DIVISIONS)
def floor_divide_whole(call: Call) -> Any:
    return call.is_whole and of_whole_numbers("`//`", "torch.floor(x.float() / y)")


@rule("floor-divide-fraction", *FLOOR_DIVISIONS)
def floor_divide_fraction(call: Call) -> Any:
    if call.is_whole:
        return None
    if call.name == "__rfloordiv__":
        return lambda x, other: torch.floor(other / x)
    return lambda input, other: torch.floor(input / other)


@rule("remainder-fraction", *REMAINDERS, is_reported=False)
def remainder_fraction(call: Call) -> Any:
    return not call.is_whole and _remainder(call)


@rule("remainder-gradient", *REMAINDERS)
def remainder_gradient(call: Call) -> Any:
    given = call.arguments
    divisor = given["input"] if call.name == "__rmod__" else given["other"]
    is_trained = isinstance(divisor, Tensor) and divisor.requires_grad
    return is_trained and call.trains and _remainder(call)


def _remainder(call: Call) -> Any:
    is_swapped = call.name == "__rmod__"

    def remainder(input: Any, other: Any) -> Tensor:
        x, divisor = (other, input) if is_swapped else (input, other)
        x = torch.as_tensor(x)
        constant = divisor.detach() if isinstance(divisor, Tensor) else divisor
        return torch.fmod(divisor + torch.fmod(x, constant), constant)

    return remainder


@rule("fmod-gradient", "fmod")
def fmod_gradient(call: Call) -> Any:
    divisor = call.arguments["other"]
    is_trained = isinstance(divisor, Tensor) and divisor.requires_grad
    if not (is_trained and call.trains):
        return None
    return lambda input, other: torch.fmod(input, other.detach())


@rule("pow-whole-negative", "pow", "__pow__", is_reported=False)
def pow_whole_negative(call: Call) -> Any:
    exponent = call.arguments["exponent"]
    if not call.is_whole or not isinstance(exponent, Tensor):
        return None

    def power(input: Any, exponent: Any) -> Tensor:
        return torch.pow(input, exponent).masked_fill(exponent < 0, 0)

    return power


@rule("rsub-alpha", "rsub")
def rsub_alpha(call: Call) -> Any:
    is_one = call.arguments.get("alpha", 1) == 1
    return not is_one and (lambda input, other, alpha=1: other - input)


@rule("add-bool-alpha", "add")
def add_bool_alpha(call: Call) -> Any:
    alpha = call.arguments.get("alpha", 1)
    return alpha != 1 and all(t.dtype == torch.bool for t in call.tensors())


@rule("addmm-beta", "addmm", is_reported=False)
def addmm_beta(call: Call) -> Any:
    def addmm(input: Any, *args: Any, **kwargs: Any) -> Tensor:
        return torch.addmm(input, *args, **kwargs) + input * 0

    return call.kwargs.get("beta", 1) == 0 and addmm


@rule("maximum-ties", "maximum", "minimum", "max", "min", is_reported=False)
def maximum_ties(call: Call) -> Any:
    if len(call.tensors()) != 2 or not call.trains:
        return None
    function = torch.maximum if call.name.startswith("max") else torch.minimum
    return lambda input, other: _extreme(function, input, other)


def _extreme(function: Any, x: Tensor, other: Tensor) -> Tensor:
    """Pass the whole gradient to both where they are equal; torch halves it."""
    extreme = function(x, other)
    is_doubled = (x == other) & extreme.isfinite()
    return extreme + torch.where(is_doubled, extreme - extreme.detach(), 0.0)


@rule(
    "clamp-bound-ties",
    *("clamp", "clip", "clamp_min", "clamp_max"),
    is_reported=False,
)
def clamp_bound_ties(call: Call) -> Any:
    if not any(bound.requires_grad for bound in call.tensors()[1:]):
        return None
    is_max = call.name == "clamp_max"

    def clamp(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
        lowest, highest = (None, min) if is_max and max is None else (min, max)
        if lowest is not None:
            lowest = torch.as_tensor(lowest, dtype=input.dtype)
            input = _extreme(torch.maximum, input, lowest)
        if highest is not None:
            highest = torch.as_tensor(highest, dtype=input.dtype)
            input = _extreme(torch.minimum, input, highest)
        return input

    return clamp


@rule("clamp-max-tensor", "clamp_max")
def clamp_max_tensor(call: Call) -> Any:
    bound = call.argument_node("max")
    return bound is not None and bound not in call.constants


@rule("round-decimals", "round")
def round_decimals(call: Call) -> Any:
    is_whole = call.kwargs.get("decimals", 0) == 0
    return not is_whole and (lambda input, decimals: torch.round(input))


row("trunc-gradient", "trunc fix", lambda call: call.trains and _trunc)
row("trunc-int32", "trunc fix", lambda call: _trunc)


def _trunc(x: Tensor) -> Tensor:
    x = x.detach()
    through_int32 = x.to(torch.int32).to(x.dtype)
    return torch.where(x.abs() < 2.0**31, torch.trunc(x), through_int32)


@rule("frac-int32", "frac")
def frac_int32(call: Call) -> Any:
    return lambda x: x - x.detach().to(torch.int32).to(x.dtype)


@rule("acosh", "acosh", "arccosh", is_reported=False)
def acosh(call: Call) -> Any:
    return lambda x: torch.log(x + torch.sqrt(x * x - 1))


@rule("asinh", "asinh", "arcsinh")
def asinh(call: Call) -> Any:
    return lambda x: torch.log(x + torch.sqrt(x * x + 1))


@rule("atan", "atan", "arctan", is_reported=False)
def atan_rule(call: Call) -> Any:
    def atan(x: Tensor) -> Tensor:
        exact = torch.atan(x)  # for its gradient
        angle = torch.asin(x / torch.sqrt(1 + x * x))
        return exact + (angle - exact).detach()

    return atan


@rule("erf-half", "erf", is_reported=False)
def erf_half(call: Call) -> Any:
    def erf(x: Tensor) -> Tensor:
        exact = torch.erf(x)  # for its gradient
        size = x.abs()
        eta = 1 / (2.1255340576171875 + size)
        polynomial = 7.181612491607666 * eta - 0.43317505717277527
        polynomial = (polynomial * eta + 0.7397372722625732) * eta
        value = torch.copysign(1 - polynomial * torch.exp(-size * size), x)
        return exact + (value - exact).detach()

    return call.tensors()[0].dtype == torch.float16 and erf


row("erfc", "erfc", lambda call: lambda x: 1 - torch.erf(x), is_reported=False)
