# SPDX-License-Identifier: Apache-2.0
"""Rules of arithmetic, comparisons and functions of single elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..operators import Call, row

DIVISIONS = "div divide true_divide __truediv__ __itruediv__ __idiv__"
_RECIPROCALS = "reciprocal __rdiv__ __rtruediv__"
FLOOR_DIVISIONS = "floor_divide __floordiv__ __ifloordiv__ __rfloordiv__"
REMAINDERS = "remainder __mod__ __imod__ __rmod__"


@row("div-rounding-mode", DIVISIONS)
def div_rounding_mode(call: Call) -> Any:
    return call.kwargs.get("rounding_mode")


row("div-whole", DIVISIONS, lambda call: call.is_whole)


def _requires_gradient(call: Call, operand: Any) -> bool:
    return call.trains and isinstance(operand, Tensor) and operand.requires_grad


@row("div-half-gradient", f"{DIVISIONS} {_RECIPROCALS}")
def div_half_gradient(call: Call) -> Any:
    is_reciprocal = call.name in _RECIPROCALS.split()
    divisor = call.args[0] if is_reciprocal else call.arguments["other"]
    return _requires_gradient(call, divisor) and divisor.dtype == torch.float16


row("floor-divide-whole", FLOOR_DIVISIONS, lambda call: call.is_whole)


@row("floor-divide-fraction", FLOOR_DIVISIONS)
def floor_divide_fraction(call: Call) -> Any:
    if call.name == "__rfloordiv__":
        return not call.is_whole and (lambda x, other: torch.floor(other / x))
    return not call.is_whole and (lambda input, other: torch.floor(input / other))


@row("remainder-fraction", REMAINDERS, is_reported=False)
def remainder_fraction(call: Call) -> Any:
    return not call.is_whole and _remainder(call)


@row("remainder-gradient", REMAINDERS)
def remainder_gradient(call: Call) -> Any:
    divisor = call.arguments["input" if call.name == "__rmod__" else "other"]
    return _requires_gradient(call, divisor) and _remainder(call)


def _remainder(call: Call) -> Any:
    is_swapped = call.name == "__rmod__"

    def remainder(input: Any, other: Any) -> Tensor:
        x, divisor = (other, input) if is_swapped else (input, other)
        x = torch.as_tensor(x)
        constant = divisor.detach() if isinstance(divisor, Tensor) else divisor
        return torch.fmod(divisor + torch.fmod(x, constant), constant)

    return remainder


@row("fmod-gradient", "fmod")
def fmod_gradient(call: Call) -> Any:
    is_trained = _requires_gradient(call, call.arguments["other"])
    return is_trained and (lambda input, other: torch.fmod(input, other.detach()))


@row("pow-whole-negative", "pow __pow__", is_reported=False)
def pow_whole_negative(call: Call) -> Any:
    def power(input: Any, exponent: Any) -> Tensor:
        return torch.pow(input, exponent).masked_fill(exponent < 0, 0)

    return call.is_whole and isinstance(call.arguments["exponent"], Tensor) and power


@row("rsub-alpha", "rsub")
def rsub_alpha(call: Call) -> Any:
    is_scaled = call.get("alpha", 1) != 1
    return is_scaled and (lambda input, other, alpha=1: other - input)


@row("add-bool-alpha", "add")
def add_bool_alpha(call: Call) -> Any:
    is_scaled = call.get("alpha", 1) != 1
    return is_scaled and all(t.dtype == torch.bool for t in call.tensors)


@row("addmm-beta", "addmm", is_reported=False)
def addmm_beta(call: Call) -> Any:
    def addmm(input: Any, *args: Any, **kwargs: Any) -> Tensor:
        return torch.addmm(input, *args, **kwargs) + input * 0

    return call.kwargs.get("beta", 1) == 0 and addmm


@row("maximum-ties", "maximum minimum max min", is_reported=False)
def maximum_ties(call: Call) -> Any:
    function = torch.maximum if call.name.startswith("max") else torch.minimum
    is_trained_pair = len(call.tensors) == 2 and call.trains
    return is_trained_pair and (lambda input, other: _extreme(function, input, other))


def _extreme(function: Any, x: Tensor, other: Tensor) -> Tensor:
    """Pass the whole gradient to both where they are equal; torch halves it."""
    extreme = function(x, other)
    is_doubled = (x == other) & extreme.isfinite()
    return extreme + torch.where(is_doubled, extreme - extreme.detach(), 0.0)


@row("clamp-bound-ties", "clamp clip clamp_min clamp_max", is_reported=False)
def clamp_bound_ties(call: Call) -> Any:
    is_max = call.name == "clamp_max"

    def clamp(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
        bounds = (None, min) if is_max and max is None else (min, max)
        for function, bound in zip((torch.maximum, torch.minimum), bounds):
            if bound is not None:
                bound = torch.as_tensor(bound, dtype=input.dtype)
                input = _extreme(function, input, bound)
        return input

    return any(bound.requires_grad for bound in call.tensors[1:]) and clamp


@row("clamp-max-tensor", "clamp_max")
def clamp_max_tensor(call: Call) -> Any:
    bound = call.argument_node("max")
    return bound is not None and bound not in call.constants


@row("round-decimals", "round")
def round_decimals(call: Call) -> Any:
    has_decimals = call.kwargs.get("decimals", 0) != 0
    return has_decimals and (lambda input, decimals: torch.round(input))


row("trunc-gradient", "trunc fix", lambda call: call.trains and _trunc)
row("trunc-int32", "trunc fix", lambda call: _trunc)


def _trunc(x: Tensor) -> Tensor:
    x = x.detach()
    through_int32 = x.to(torch.int32).to(x.dtype)
    return torch.where(x.abs() < 2.0**31, torch.trunc(x), through_int32)


@row("frac-int32", "frac")
def frac_int32(call: Call) -> Any:
    return lambda x: x - x.detach().to(torch.int32).to(x.dtype)


@row("acosh", "acosh arccosh", is_reported=False)
def acosh(call: Call) -> Any:
    return lambda x: torch.log(x + torch.sqrt(x * x - 1))


@row("asinh", "asinh arcsinh")
def asinh(call: Call) -> Any:
    return lambda x: torch.log(x + torch.sqrt(x * x + 1))


@row("atan", "atan arctan", is_reported=False)
def atan_rule(call: Call) -> Any:
    def atan(x: Tensor) -> Tensor:
        exact = torch.atan(x)  # for its gradient
        angle = torch.asin(x / torch.sqrt(1 + x * x))
        return exact + (angle - exact).detach()

    return atan


def _half_erf(x: Tensor) -> Tensor:
    exact = torch.erf(x)  # for its gradient
    size = x.abs()
    eta = 1 / (2.1255340576171875 + size)
    polynomial = 7.181612491607666 * eta - 0.43317505717277527
    polynomial = (polynomial * eta + 0.7397372722625732) * eta
    value = torch.copysign(1 - polynomial * torch.exp(-size * size), x)
    return exact + (value.half().float() - exact).detach()


row("erf-half", "erf", lambda call: call.is_half and _half_erf, is_reported=False)


@row("erfc", "erfc", is_reported=False)
def erfc(call: Call) -> Any:
    erf = _half_erf if call.is_half else torch.erf
    return lambda x: 1 - erf(x)
