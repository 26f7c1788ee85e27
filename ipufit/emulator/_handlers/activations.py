# SPDX-License-Identifier: Apache-2.0
"""Rules of activations."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn import functional

from ipufit.emulator._handlers.rules import Call, rule

_SELU = 1.6732632423543772, 1.0507009873554805
"""The numbers `alpha` and `scale` of `torch.selu`."""


@rule("gelu-exact", "gelu")
def _(call: Call) -> Any:
    if call.arguments("input").get("approximate", "none") != "none":
        return None
    return lambda input, approximate="none": functional.gelu(input, approximate="tanh")


@rule("prelu-gradient", "prelu", "_prelu_kernel")
def _(call: Call) -> Any:
    if not call.trains:
        return None
    return lambda x, weight: functional.prelu(x.detach(), weight.detach())


@rule("rrelu-zero", "rrelu", is_reported=False)
def _(call: Call) -> Any:
    def rrelu(input: Any, *args: Any, **kwargs: Any) -> Tensor:
        kwargs["inplace"] = False
        return torch.where(input == 0, input, functional.rrelu(input, *args, **kwargs))

    return call.trains and rrelu


@rule("leaky-relu-zero", "leaky_relu", is_reported=False)
def _(call: Call) -> Any:
    def leaky_relu(
        input: Any, negative_slope: float = 0.01, inplace: bool = False
    ) -> Tensor:
        return torch.where(input < 0, input * negative_slope, input)

    return call.trains and leaky_relu


@rule("leaky-relu-negative-slope", "leaky_relu")
def _(call: Call) -> Any:
    def leaky_relu(
        input: Any, negative_slope: float = 0.01, inplace: bool = False
    ) -> Tensor:
        return input + (functional.leaky_relu(input, negative_slope) - input).detach()

    slope = call.arguments("input negative_slope").get("negative_slope", 0.01)
    return call.trains and slope < 0 and leaky_relu


@rule("elu-negative-alpha", "elu")
def _(call: Call) -> Any:
    return _alpha(call) < 0 and _elu(call)


@rule("celu-alpha", "celu")
def _(call: Call) -> Any:
    return _alpha(call) != 1 and _elu(call)


@rule("elu-large", "elu", "selu", "celu", is_reported=False)
@rule("elu-zero", "elu", "selu", "celu", is_reported=False)
def _(call: Call) -> Any:
    return call.trains and _elu(call)


def _alpha(call: Call) -> float:
    return float(call.arguments("input alpha").get("alpha", 1.0))


def _elu(call: Call) -> Callable[..., Tensor]:
    """Return PopART's Selu, which computes `elu`, `selu` and `celu`.

    Where `exp` overflows, its gradient is multiplied by 0, which gives NaN.
    """
    alpha, scale = _SELU if call.name.startswith("selu") else (_alpha(call), 1.0)

    def elu(input: Any, *_: Any, **__: Any) -> Any:
        negative: Any = alpha * (torch.exp(input) - 1)
        either: Any = torch.where(input > 0, input, negative)
        either = torch.where(input == 0, input * ((1 + alpha) / 2), either)
        if alpha < 0:
            sides = input.clamp(min=0) + negative.clamp(max=0)
            either = either + (sides - either).detach()
        return either * scale

    return elu


@rule("softplus-negative-beta", "softplus")
def _(call: Call) -> Any:
    def softplus(input: Any, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
        torchs = functional.softplus(input, beta, threshold)
        size = input.detach().abs()
        return torchs + torch.where(beta * input <= threshold, size, 0.0)

    beta = call.arguments("input beta").get("beta", 1.0)
    return beta < 0 and softplus


@rule("hardsigmoid-ends", "hardsigmoid", is_reported=False)
def _(call: Call) -> Any:
    def hardsigmoid(input: Any, inplace: bool = False) -> Tensor:
        zero = input.new_zeros(())  # where both are equal, each has half the gradient
        return torch.maximum(torch.minimum(input / 6 + 0.5, zero + 1), zero)

    return call.trains and hardsigmoid


@rule("hardshrink-negative", "hardshrink")
def _(call: Call) -> Any:
    return call.arguments("input lambd").get("lambd", 0.5) < 0 and _hardshrink


@rule("hardshrink-nan", "hardshrink", is_reported=False)
def _(call: Call) -> Any:
    return _hardshrink


def _hardshrink(input: Any, lambd: float = 0.5) -> Tensor:
    return torch.where(input.abs() > abs(lambd), input, 0.0)


@rule("threshold-nan", "threshold", "_threshold", is_reported=False)
def _(call: Call) -> Any:
    def threshold(
        input: Any, threshold: float, value: float, inplace: bool = False
    ) -> Tensor:
        return torch.where(input > threshold, input, value)

    return threshold


@rule("log-sigmoid-small", "log_sigmoid", "logsigmoid")
@rule("log-sigmoid-large", "log_sigmoid", "logsigmoid", is_reported=False)
def _(call: Call) -> Any:
    is_half = call.tensors()[0].dtype == torch.float16

    def log_sigmoid(input: Tensor) -> Tensor:
        sigmoid = torch.sigmoid(input)
        return torch.log(sigmoid.half().float() if is_half else sigmoid)

    return log_sigmoid


_SINGULAR = frozenset({"sqrt", "rsqrt", "log", "log2", "log10", "reciprocal"})
"""Functions whose gradient at 0 is infinite."""


@rule("clamp-gradient-nan", "clamp", "clip", "clamp_min")
@rule("relu-gradient-nan", "relu")
@rule("where-gradient-nan", "where", "masked_fill")
def _(call: Call) -> Any:
    given = (*call.args, *call.kwargs.values())
    is_0 = any(isinstance(v, (int, float)) and v == 0 for v in given)
    is_passing = call.trains and not call.users.isdisjoint(_SINGULAR)
    return is_passing and (is_0 or call.name.startswith("relu"))
