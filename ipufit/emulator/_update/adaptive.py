# SPDX-License-Identifier: Apache-2.0
"""Adam, LAMB and RMSprop as the device does them.

Their state holds values without the loss scaling, which is taken out first. Sources:
PopART's `adam.hpp`, `adaptive.hpp` and `adamvarupdatex.cpp`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Mapping

import torch
from torch import Tensor

from ipufit.emulator._optimizers.kinds import OptimizerKind
from ipufit.emulator._optimizers.values import (
    GroupVariables,
    OptimizerSettings,
    Variable,
)
from ipufit.emulator._update.operations import Values
from ipufit.emulator._update.rule import (
    STEP,
    WEIGHT,
    Operands,
    Rules,
    Scalars,
    UpdateRule,
    WeightState,
    bias_correction,
    square_root,
    unscaled,
    with_penalty,
)


@dataclass(frozen=True)
class _Moments(UpdateRule):
    """Means of the gradients and of their squares, as Adam and LAMB keep them."""

    first_type: torch.dtype
    second_type: torch.dtype

    def scalars(self, variables: GroupVariables, scaling: Variable) -> Scalars:
        """Give the hyper-parameters as they are."""
        return {
            "learningRate": variables.lr,
            "weightDecay": variables.weight_decay,
            "beta1": variables.beta1,
            "beta2": variables.beta2,
            "eps": variables.eps,
        }

    def initial_state(self, weight: Tensor, scalars: Scalars) -> WeightState:
        """Make means of zero and a counter."""
        return {
            "Accl1": torch.zeros_like(weight, dtype=self.first_type),
            "Accl2": torch.zeros_like(weight, dtype=self.second_type),
            STEP: torch.zeros(()),
        }

    def factors(self, n: Mapping[str, float], step: float) -> dict[str, float]:
        """Subtract in double precision: 1 - beta has few digits in float32."""
        return {
            "1-beta1": 1.0 - n["beta1"],
            "1-beta2": 1.0 - n["beta2"],
        }

    def direction(self, given: Operands, gradients: Values) -> Values:
        """Take the loss scaling out."""
        return unscaled(given, gradients)

    def _update_moments(self, given: Operands, direction: Values) -> None:
        ops, n = given.ops, given.n
        first, second = given["Accl1"], given["Accl2"]
        ops.mul_(first, n["beta1"])
        ops.add_(first, direction, alpha=n["1-beta1"])
        ops.mul_(second, n["beta2"])
        ops.addcmul_(second, direction, direction, value=n["1-beta2"])
        given["Accl1"] = first
        given["Accl2"] = second

    def _denominators(self, given: Operands) -> Values:
        ops, n = given.ops, given.n
        roots = ops.sqrt(given["Accl2"])
        if ops.may_differ(n["root"], 1.0):
            ops.div_(roots, n["root"])
        ops.add_(roots, n["eps"])
        return roots


@dataclass(frozen=True)
class AdamRule(_Moments):
    """Adam, or AdamW.

    ::

        s <- a/ls                      Adam: + wd*w; clipping sees s
        m <- b1*m + (1-b1)*s           v <- b2*v + (1-b2)*s^2
        w <- w - lr * (m/(1-b1^t)) / (sqrt(v/(1-b2^t)) + eps)    AdamW: - lr*wd*w

    Attributes:
        decays_gradient: Whether it is Adam, whose weight decay is a penalty.
    """

    decays_gradient: bool

    def factors(self, n: Mapping[str, float], step: float) -> dict[str, float]:
        """Correct the means' start at zero by the size of the step."""
        lr = n["learningRate"]
        first = bias_correction(n["beta1"], step)
        return {
            **super().factors(n, step),
            "shrinkage": 1.0 - lr * n["weightDecay"],
            "stepSize": lr / first if first else math.nan,
            "root": square_root(bias_correction(n["beta2"], step)),
        }

    def direction(self, given: Operands, gradients: Values) -> Values:
        """Take the loss scaling out, and add Adam's penalty."""
        direction = unscaled(given, gradients)
        if not self.decays_gradient:
            return direction
        return with_penalty(given, direction)

    def update(self, given: Operands, direction: Values) -> None:
        """Update the means and the weights."""
        ops, n = given.ops, given.n
        self._update_moments(given, direction)
        weights = given[WEIGHT]
        if not self.decays_gradient and ops.may_differ(n["shrinkage"], 1.0):
            ops.mul_(weights, n["shrinkage"])
        first, denominators = given["Accl1"], self._denominators(given)
        ops.addcdiv_(weights, first, denominators, value=-n["stepSize"])
        given[WEIGHT] = weights


@dataclass(frozen=True)
class LambRule(_Moments):
    """LAMB: Adam's direction, at a length in proportion to the weight's.

    ::

        x <- m/(sqrt(v) + eps) + wd*w            m and v corrected for bias, or not
        w <- w - lr * min(|w|, max_weight_norm)/|x| * x

    The ratio is 1 where the weight's norm, the direction's or the largest norm is 0.

    Attributes:
        corrects_bias: Whether the means are corrected for their start at zero.
    """

    corrects_bias: bool

    def scalars(self, variables: GroupVariables, scaling: Variable) -> Scalars:
        """Give the hyper-parameters as they are."""
        scalars = super().scalars(variables, scaling)
        return {**scalars, "maxWeightNorm": variables.max_weight_norm}

    def factors(self, n: Mapping[str, float], step: float) -> dict[str, float]:
        """Correct the means' start at zero, if it is to be."""
        first = second = 1.0
        if self.corrects_bias:
            first = bias_correction(n["beta1"], step)
            second = bias_correction(n["beta2"], step)
        return {
            **super().factors(n, step),
            "firstCorrection": first,
            "root": square_root(second),
        }

    def update(self, given: Operands, direction: Values) -> None:
        """Update the means and the weights."""
        ops, n = given.ops, given.n
        self._update_moments(given, direction)
        updates = ops.div(given["Accl1"], n["firstCorrection"])
        ops.div_(updates, self._denominators(given))
        weights = given[WEIGHT]
        if ops.may_differ(n["weightDecay"], 0.0):
            ops.add_(updates, weights, alpha=n["weightDecay"])
        lengths = ops.norms(weights).clamp(max=n["maxWeightNorm"])
        update_lengths = ops.norms(updates)
        is_zero = torch.eq(lengths, 0.0) | torch.eq(update_lengths, 0.0)
        ones = torch.ones_like(lengths)
        ratios = torch.where(is_zero, ones, lengths / update_lengths)
        ops.scale_each_(updates, ratios, -n["learningRate"])
        ops.add_(weights, updates)
        given[WEIGHT] = weights


@dataclass(frozen=True)
class RMSpropRule(UpdateRule):
    """RMSprop, torch's or TensorFlow's.

    ::

        s  <- a/ls + wd*w
        v1 <- alpha*v1 + (1-alpha)*s^2           v1 starts at 0; TensorFlow: 1
        v2 <- alpha*v2 + (1-alpha)*s             if centered
        q  <- v1 - v2^2                          not centered: v1
        x  <- s/(sqrt(q) + eps)                  TensorFlow: s/sqrt(q + eps)
        v3 <- momentum*v3 + x                    TensorFlow: + lr*x
        w  <- w - lr*v3                          TensorFlow: - v3

    Without momentum, a constant zero, there is no `v3`: `w <- w - lr*x`.

    Attributes:
        is_centered: Whether the variance divides instead of the squares' mean.
        is_tensorflow: Whether it is TensorFlow's.
        has_momentum: Whether momentum isn't a constant zero.
        first_type: The type of `v1`.
        second_type: The type of `v2`; `v3` is always float32.
    """

    is_centered: bool
    is_tensorflow: bool
    has_momentum: bool
    first_type: torch.dtype
    second_type: torch.dtype

    def scalars(self, variables: GroupVariables, scaling: Variable) -> Scalars:
        """Give the hyper-parameters as they are."""
        return {
            "learningRate": variables.lr,
            "weightDecay": variables.weight_decay,
            "alpha": variables.alpha,
            "momentum": variables.momentum,
            "eps": variables.eps,
        }

    def initial_state(self, weight: Tensor, scalars: Scalars) -> WeightState:
        """Make the accumulators that the variant has."""
        start = torch.ones_like if self.is_tensorflow else torch.zeros_like
        state = {"Accl1": start(weight, dtype=self.first_type)}
        if self.is_centered:
            state["Accl2"] = torch.zeros_like(weight, dtype=self.second_type)
        if self.has_momentum:
            state["Accl3"] = torch.zeros_like(weight, dtype=torch.float32)
        return state

    def factors(self, n: Mapping[str, float], step: float) -> dict[str, float]:
        """Subtract in double precision: 1 - alpha has few digits in float32."""
        return {"1-alpha": 1.0 - n["alpha"]}

    def direction(self, given: Operands, gradients: Values) -> Values:
        """Take the loss scaling out and add the penalty."""
        return with_penalty(given, unscaled(given, gradients))

    def update(self, given: Operands, direction: Values) -> None:
        """Update the accumulators and the weights."""
        ops, n = given.ops, given.n
        weights, lr = given[WEIGHT], n["learningRate"]
        updates = ops.div(direction, self._roots(given, direction))
        if not self.has_momentum:
            ops.add_(weights, updates, alpha=-lr)
        else:
            velocity = given["Accl3"]
            inside, outside = (lr, 1.0) if self.is_tensorflow else (1.0, lr)
            ops.mul_(velocity, n["momentum"])
            ops.add_(velocity, updates, alpha=inside)
            ops.add_(weights, velocity, alpha=-outside)
            given["Accl3"] = velocity
        given[WEIGHT] = weights

    def _roots(self, given: Operands, direction: Values) -> Values:
        ops, n = given.ops, given.n
        alpha, rest = n["alpha"], n["1-alpha"]
        squares = given["Accl1"]
        ops.mul_(squares, alpha)
        ops.addcmul_(squares, direction, direction, value=rest)
        given["Accl1"] = squares
        squares = given["Accl1"]
        if self.is_centered:
            means = given["Accl2"]
            ops.mul_(means, alpha)
            ops.add_(means, direction, alpha=rest)
            given["Accl2"] = means
            means = given["Accl2"]
            squares = ops.addcmul(squares, means, means, value=-1.0)
        if self.is_tensorflow:
            roots = ops.add(squares, n["eps"])
            ops.sqrt_(roots)
            return roots
        roots = ops.sqrt(squares)
        ops.add_(roots, n["eps"])
        return roots


def _types(settings: OptimizerSettings) -> dict[str, torch.dtype]:
    return {
        "first_type": settings.first_order_momentum_accum_type,
        "second_type": settings.second_order_momentum_accum_type,
    }


def _rmsprop(
    settings: OptimizerSettings, variables: GroupVariables, is_centered: bool
) -> UpdateRule:
    return RMSpropRule(
        is_centered=is_centered,
        is_tensorflow=settings.use_tf_variant,
        has_momentum=variables.momentum != Variable(0.0, is_const=True),
        **_types(settings),
    )


RULES: Rules = {
    OptimizerKind.ADAM: lambda s, _: AdamRule(**_types(s), decays_gradient=True),
    OptimizerKind.ADAMW: lambda s, _: AdamRule(**_types(s), decays_gradient=False),
    OptimizerKind.ADAMW_NO_BIAS: lambda s, _: AdamRule(
        **_types(s), decays_gradient=False
    ),
    OptimizerKind.LAMB: lambda s, _: LambRule(**_types(s), corrects_bias=True),
    OptimizerKind.LAMB_NO_BIAS: lambda s, _: LambRule(**_types(s), corrects_bias=False),
    OptimizerKind.RMSPROP: lambda s, v: _rmsprop(s, v, is_centered=False),
    OptimizerKind.RMSPROP_CENTERED: lambda s, v: _rmsprop(s, v, is_centered=True),
}
