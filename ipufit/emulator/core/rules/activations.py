# SPDX-License-Identifier: Apache-2.0
"""Rules of activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..operators import Call, row, rule


@rule("gelu-exact", "gelu")
def gelu_exact(call: Call) -> Any:
    if call.arguments.get("approximate", "none") != "none":
        return None
    return lambda input, approximate="none": functional.gelu(input, approximate="tanh")


@rule("prelu-gradient", "prelu", "_prelu_kernel")
def prelu_gradient(call: Call) -> Any:
    if not call.trains:
        return None
    return lambda x, weight: functional.prelu(x.detach(), weight.detach())


@rule("rrelu-zero", "rrelu", is_reported=False)
def rrelu_zero(call: Call) -> Any:
    def rrelu(input: Any, *args: Any, **kwargs: Any) -> Tensor:
        kwargs["inplace"] = False
        return torch.where(input == 0, input, functional.rrelu(input, *args, **kwargs))

    return call.trains and rrelu


@rule("leaky-relu-negative-slope", "leaky_relu")
def leaky_relu_negative_slope(call: Call) -> Any:
    def leaky_relu(
        input: Any, negative_slope: float = 0.01, inplace: bool = False
    ) -> Tensor:
        return input + (functional.leaky_relu(input, negative_slope) - input).detach()

    slope = call.arguments.get("negative_slope", 0.01)
    return call.trains and slope < 0 and leaky_relu


@rule("elu-negative-alpha", "elu")
def elu_negative_alpha(call: Call) -> Any:
    def elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
        negative: Any = alpha * torch.expm1(input)
        return input.clamp(min=0) + negative.clamp(max=0)

    return _alpha(call) < 0 and elu


@rule("celu-alpha", "celu")
def celu_alpha(call: Call) -> Any:
    def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
        return functional.elu(input, alpha)

    return _alpha(call) != 1 and celu


def _alpha(call: Call) -> float:
    return float(call.arguments.get("alpha", 1.0))


row("elu-large", "elu selu celu", lambda call: call.trains)


@rule("mish", "mish", is_reported=False)
def mish_rule(call: Call) -> Any:
    def mish(input: Any, inplace: bool = False) -> Any:
        square = torch.sigmoid(-input) ** 2
        return input * (1 - square) / (1 + square)

    return mish


@rule("softplus-negative-beta", "softplus")
def softplus_negative_beta(call: Call) -> Any:
    def softplus(input: Any, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
        torchs = functional.softplus(input, beta, threshold)
        size = input.detach().abs()
        return torchs + torch.where(beta * input <= threshold, size, 0.0)

    beta = call.arguments.get("beta", 1.0)
    return beta < 0 and softplus


@rule("hardshrink-negative", "hardshrink")
def hardshrink_negative(call: Call) -> Any:
    def hardshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
        return functional.hardshrink(input, abs(lambd))

    return call.arguments.get("lambd", 0.5) < 0 and hardshrink


@rule("log-sigmoid-small", "log_sigmoid", "logsigmoid")
@rule("log-sigmoid-large", "log_sigmoid", "logsigmoid", is_reported=False)
def log_sigmoid_small(call: Call) -> Any:
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
def clamp_gradient_nan(call: Call) -> Any:
    given = (*call.args, *call.kwargs.values())
    is_0 = any(isinstance(v, (int, float)) and v == 0 for v in given)
    is_passing = call.trains and not call.users.isdisjoint(_SINGULAR)
    return is_passing and (is_0 or call.name == "relu")
