# SPDX-License-Identifier: Apache-2.0
"""Rules of activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..operators import Call, row


@row("gelu-exact", "gelu")
def gelu_exact(call: Call) -> Any:
    is_exact = call.get("approximate", "none") == "none"
    return is_exact and (lambda x, **_: functional.gelu(x, approximate="tanh"))


@row("prelu-gradient", "prelu _prelu_kernel")
def prelu_gradient(call: Call) -> Any:
    return call.trains and (
        lambda x, weight: functional.prelu(x.detach(), weight.detach())
    )


@row("rrelu-zero", "rrelu", is_reported=False)
def rrelu_zero(call: Call) -> Any:
    def rrelu(input: Any, *args: Any, **kwargs: Any) -> Tensor:
        kwargs["inplace"] = False
        return torch.where(input == 0, input, functional.rrelu(input, *args, **kwargs))

    return call.trains and rrelu


@row("leaky-relu-negative-slope", "leaky_relu")
def leaky_relu_negative_slope(call: Call) -> Any:
    slope = call.get("negative_slope", 0.01)

    def leaky_relu(input: Any, *_: Any, **__: Any) -> Tensor:
        return input + (functional.leaky_relu(input, slope) - input).detach()

    return call.trains and slope < 0 and leaky_relu


@row("elu-negative-alpha", "elu")
def elu_negative_alpha(call: Call) -> Any:
    alpha = call.get("alpha", 1.0)

    def elu(input: Any, *_: Any, **__: Any) -> Any:
        negative: Any = alpha * torch.expm1(input)
        return input.clamp(min=0) + negative.clamp(max=0)

    return alpha < 0 and elu


@row("celu-alpha", "celu")
def celu_alpha(call: Call) -> Any:
    alpha = call.get("alpha", 1.0)
    return alpha != 1 and (lambda input, *_, **__: functional.elu(input, alpha))


row("elu-large", "elu selu celu", lambda call: call.trains)


@row("mish", "mish", is_reported=False)
def mish(call: Call) -> Any:
    def stored(x: Tensor) -> Tensor:
        return x.half().float() if call.is_half else x

    def mish(input: Any, *_: Any, **__: Any) -> Any:
        square = stored(stored(torch.sigmoid(-input)) ** 2)
        return input * (1 - square) / (1 + square)

    return mish


@row("softplus-negative-beta", "softplus")
def softplus_negative_beta(call: Call) -> Any:
    beta, threshold = call.get("beta", 1.0), call.get("threshold", 20.0)

    def softplus(input: Any, *_: Any, **__: Any) -> Tensor:
        size = torch.where(beta * input <= threshold, input.detach().abs(), 0.0)
        return functional.softplus(input, beta, threshold) + size

    return beta < 0 and softplus


@row("hardshrink-negative", "hardshrink")
def hardshrink_negative(call: Call) -> Any:
    size = call.get("lambd", 0.5)
    return size < 0 and (lambda input, *_, **__: functional.hardshrink(input, -size))


@row("log-sigmoid-small", "log_sigmoid logsigmoid")
@row("log-sigmoid-large", "log_sigmoid logsigmoid", is_reported=False)
def log_sigmoid(call: Call) -> Any:
    def log_sigmoid(input: Tensor) -> Tensor:
        sigmoid = torch.sigmoid(input)
        return torch.log(sigmoid.half().float() if call.is_half else sigmoid)

    return log_sigmoid


_SINGULAR = frozenset({"sqrt", "rsqrt", "log", "log2", "log10", "reciprocal"})
"""Functions whose gradient at 0 is infinite."""


@row("clamp-gradient-nan", "clamp clip clamp_min clamp_max")
@row("relu-gradient-nan", "relu")
@row("where-gradient-nan", "where masked_fill")
def gradient_nan(call: Call) -> Any:
    values = (*call.args, *call.kwargs.values())
    is_0 = any(isinstance(v, (int, float)) and v == 0 for v in values)
    is_passing = call.trains and not call.users.isdisjoint(_SINGULAR)
    return is_passing and (is_0 or call.name == "relu")
