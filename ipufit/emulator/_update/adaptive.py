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

from ipufit.emulator._optimizers.values import GroupVariables, Variable
from ipufit.emulator._update import fused_kernels as _fused_kernels
from ipufit.emulator._update.weight_group import (
    STEP,
    UpdateRule,
    WeightGroup,
    WeightState,
    widened,
    write,
)


@dataclass(frozen=True)
class _Moments(UpdateRule):
    """Means of the gradients and of their squares, as Adam and LAMB keep them."""

    first_type: torch.dtype
    second_type: torch.dtype

    def scalars(
        self, variables: GroupVariables, scaling: Variable
    ) -> dict[str, Variable]:
        """Give the hyper-parameters as they are."""
        return {
            "learningRate": variables.lr,
            "weightDecay": variables.weight_decay,
            "beta1": variables.beta1,
            "beta2": variables.beta2,
            "eps": variables.eps,
        }

    def initial_state(
        self, weight: Tensor, scalars: Mapping[str, Variable]
    ) -> WeightState:
        """Make means of zero and a counter."""
        return {
            "Accl1": torch.zeros_like(weight, dtype=self.first_type),
            "Accl2": torch.zeros_like(weight, dtype=self.second_type),
            STEP: torch.zeros(()),
        }

    def directions(self, group: WeightGroup, gradients: list[Tensor]) -> list[Tensor]:
        """Take the loss scaling out."""
        return group.unscaled(gradients)

    def _update_moments(
        self, group: WeightGroup, directions: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        beta1, beta2 = group.scalars["beta1"], group.scalars["beta2"]
        first, second = group.load("Accl1"), group.load("Accl2")
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, directions, alpha=1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, directions, directions, value=1.0 - beta2)
        return group.store("Accl1", first), group.store("Accl2", second)


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

    def directions(self, group: WeightGroup, gradients: list[Tensor]) -> list[Tensor]:
        """Take the loss scaling out, and add Adam's penalty."""
        directions = group.unscaled(gradients)
        if not self.decays_gradient:
            return directions
        return _with_penalty(group, directions)

    def apply(self, group: WeightGroup, directions: list[Tensor]) -> None:
        """Update the means and the weights."""
        if not self._apply_kernel(group, directions):
            self._apply_steps(group, directions)

    def _apply_kernel(self, group: WeightGroup, directions: list[Tensor]) -> bool:
        """Do it all in one pass; nothing, and False, where that isn't the same."""
        scalars = group.scalars
        beta1, beta2 = scalars["beta1"], scalars["beta2"]
        # Loaded values that make no sense give NaN, not what the kernel makes of them.
        makes_sense = 0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0 and group.step >= 0.0
        kernel = _fused_kernels.adamw() if group.suits_kernels else None
        if kernel is None or not makes_sense:
            return False
        group.next_step()
        kernel(
            group.weights,
            group.laid_out(directions),
            group.state["Accl1"],
            group.state["Accl2"],
            [],
            group.counters(),
            lr=scalars["learningRate"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0 if self.decays_gradient else scalars["weightDecay"],
            eps=scalars["eps"],
            amsgrad=False,
            maximize=False,
        )
        return True

    def _apply_steps(self, group: WeightGroup, directions: list[Tensor]) -> None:
        scalars = group.scalars
        first, second = self._update_moments(group, directions)
        step = group.next_step()
        denominators = _roots(
            second, _bias_correction(scalars["beta2"], step), scalars["eps"]
        )
        weights = widened(group.weights)
        lr, decay = scalars["learningRate"], scalars["weightDecay"]
        if decay and not self.decays_gradient:
            torch._foreach_mul_(weights, 1.0 - lr * decay)
        step_size = _quotient(lr, _bias_correction(scalars["beta1"], step))
        torch._foreach_addcdiv_(weights, first, denominators, value=-step_size)
        write(group.weights, weights)


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

    def scalars(
        self, variables: GroupVariables, scaling: Variable
    ) -> dict[str, Variable]:
        """Give the hyper-parameters as they are."""
        scalars = super().scalars(variables, scaling)
        return {**scalars, "maxWeightNorm": variables.max_weight_norm}

    def apply(self, group: WeightGroup, directions: list[Tensor]) -> None:
        """Update the means and the weights."""
        scalars = group.scalars
        first, second = self._update_moments(group, directions)
        step = group.next_step()
        first_correction = second_correction = 1.0
        if self.corrects_bias:
            first_correction = _bias_correction(scalars["beta1"], step)
            second_correction = _bias_correction(scalars["beta2"], step)
        denominators = _roots(second, second_correction, scalars["eps"])
        updates = list(torch._foreach_div(first, first_correction))
        torch._foreach_div_(updates, denominators)
        weights = widened(group.weights)
        if scalars["weightDecay"]:
            torch._foreach_add_(updates, weights, alpha=scalars["weightDecay"])
        ratios = _trust_ratios(weights, updates, scalars["maxWeightNorm"])
        lr = scalars["learningRate"]
        torch._foreach_mul_(updates, [-lr * ratio for ratio in ratios])
        torch._foreach_add_(weights, updates)
        write(group.weights, weights)


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

    def scalars(
        self, variables: GroupVariables, scaling: Variable
    ) -> dict[str, Variable]:
        """Give the hyper-parameters as they are."""
        return {
            "learningRate": variables.lr,
            "weightDecay": variables.weight_decay,
            "alpha": variables.alpha,
            "momentum": variables.momentum,
            "eps": variables.eps,
        }

    def initial_state(
        self, weight: Tensor, scalars: Mapping[str, Variable]
    ) -> WeightState:
        """Make the accumulators that the variant has."""
        start = torch.ones_like if self.is_tensorflow else torch.zeros_like
        state = {"Accl1": start(weight, dtype=self.first_type)}
        if self.is_centered:
            state["Accl2"] = torch.zeros_like(weight, dtype=self.second_type)
        if self.has_momentum:
            state["Accl3"] = torch.zeros_like(weight, dtype=torch.float32)
        return state

    def directions(self, group: WeightGroup, gradients: list[Tensor]) -> list[Tensor]:
        """Take the loss scaling out and add the penalty."""
        return _with_penalty(group, group.unscaled(gradients))

    def apply(self, group: WeightGroup, directions: list[Tensor]) -> None:
        """Update the accumulators and the weights."""
        lr = group.scalars["learningRate"]
        updates = list(torch._foreach_div(directions, self._roots(group, directions)))
        weights = widened(group.weights)
        if not self.has_momentum:
            torch._foreach_add_(weights, updates, alpha=-lr)
        else:
            velocity = group.load("Accl3")
            inside, outside = (lr, 1.0) if self.is_tensorflow else (1.0, lr)
            torch._foreach_mul_(velocity, group.scalars["momentum"])
            torch._foreach_add_(velocity, updates, alpha=inside)
            torch._foreach_add_(weights, velocity, alpha=-outside)
        write(group.weights, weights)

    def _roots(self, group: WeightGroup, directions: list[Tensor]) -> list[Tensor]:
        alpha, eps = group.scalars["alpha"], group.scalars["eps"]
        squares = group.load("Accl1")
        torch._foreach_mul_(squares, alpha)
        torch._foreach_addcmul_(squares, directions, directions, value=1.0 - alpha)
        squares = group.store("Accl1", squares)
        if self.is_centered:
            means = group.load("Accl2")
            torch._foreach_mul_(means, alpha)
            torch._foreach_add_(means, directions, alpha=1.0 - alpha)
            means = group.store("Accl2", means)
            squares = list(torch._foreach_addcmul(squares, means, means, value=-1.0))
        if not self.is_tensorflow:
            return _roots(squares, 1.0, eps)
        roots = list(torch._foreach_add(squares, eps))
        torch._foreach_sqrt_(roots)
        return roots


def _with_penalty(group: WeightGroup, gradients: list[Tensor]) -> list[Tensor]:
    decay = group.scalars["weightDecay"]
    if not decay:
        return gradients
    return list(torch._foreach_add(gradients, widened(group.weights), alpha=decay))


def _bias_correction(beta: float, step: float) -> float:
    """`1 - beta^step`; as on a device, NaN for a loaded state that makes no sense."""
    try:
        return 1.0 - math.pow(beta, step)
    except ValueError:
        return math.nan


def _quotient(dividend: float, divisor: float) -> float:
    return dividend / divisor if divisor else math.nan


def _roots(squares: list[Tensor], correction: float, eps: float) -> list[Tensor]:
    roots = list(torch._foreach_sqrt(squares))
    if correction != 1.0:
        root = math.sqrt(correction) if correction >= 0.0 else math.nan
        torch._foreach_div_(roots, root)
    torch._foreach_add_(roots, eps)
    return roots


def _trust_ratios(
    weights: list[Tensor], updates: list[Tensor], max_weight_norm: float
) -> list[float]:
    weight_norms = torch.stack(list(torch._foreach_norm(weights)))
    update_norms = torch.stack(list(torch._foreach_norm(updates)))
    lengths = weight_norms.clamp(max=max_weight_norm)
    is_zero = (lengths == 0.0) | (update_norms == 0.0)
    ratios: list[float] = torch.where(
        is_zero, torch.ones_like(lengths), lengths / update_norms
    ).tolist()
    return ratios
