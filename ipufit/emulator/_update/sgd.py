# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent as the device does it (PopART, `sgd.hpp`).

In the formulas `a` is a gradient of the scaled loss, `ls` the loss scaling, `vs` the
velocity scaling, `mm` momentum, `dm` dampening, `wd` weight decay.
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
    UpdateRule,
    WeightGroup,
    WeightState,
    derived,
    widened,
    write,
)


@dataclass(frozen=True)
class PlainSGD(UpdateRule):
    """SGD of weights whose momentum is a constant zero: there is no velocity.

    `w <- w * (1 - lr*(1-dm)*wd) - lr*(1-dm)/ls * a`. Clipping sees `a`, which is still
    multiplied by the loss scaling.
    """

    def scalars(
        self, variables: GroupVariables, scaling: Variable
    ) -> dict[str, Variable]:
        """Derive `scaledLearningRate0` and `weightDecayScaleFactor0`."""
        lr, dampening, decay = (
            variables.lr,
            variables.dampening,
            variables.weight_decay,
        )
        factor = derived(
            lambda lr, dm, wd: 1.0 - lr * (1.0 - dm) * wd, lr, dampening, decay
        )
        has_no_decay = decay.is_const and decay.value == 0.0
        return {
            "scaledLearningRate0": derived(
                lambda lr, dm, ls: lr * (1.0 - dm) / ls, lr, dampening, scaling
            ),
            "weightDecayScaleFactor0": Variable(
                factor.value, factor.is_const or has_no_decay
            ),
        }

    def initial_state(
        self, weight: Tensor, scalars: Mapping[str, Variable]
    ) -> WeightState:
        """Make no state."""
        return {}

    def directions(self, group: WeightGroup, gradients: list[Tensor]) -> list[Tensor]:
        """Give the gradients as they are."""
        return gradients

    def apply(self, group: WeightGroup, directions: list[Tensor]) -> None:
        """Decay the weights and subtract."""
        factor = group.scalars["weightDecayScaleFactor0"]
        step_size = group.scalars["scaledLearningRate0"]
        kernel = _fused_kernels.sgd() if group.suits_kernels else None
        if kernel is not None and step_size:
            kernel(
                group.weights,
                group.laid_out(directions),
                [],
                weight_decay=(1.0 - factor) / step_size,
                momentum=0.0,
                lr=step_size,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )
            return
        weights = widened(group.weights)
        if factor != 1.0:
            torch._foreach_mul_(weights, factor)
        torch._foreach_add_(weights, directions, alpha=-step_size)
        write(group.weights, weights)


@dataclass(frozen=True)
class MomentumSGD(UpdateRule):
    """SGD with a velocity, which dampening lessens from the first update on.

    ::

        v <- mm*v + (1-dm)*vs/ls*a + (1-dm)*wd*vs*w
        w <- w - lr/vs * v                                  without Nesterov
        w <- w - lr/vs * (vs/ls*a + vs*wd*w + mm*v)         with

    Separate SGD has the loss scaling for `vs`. Combined SGD computes `mm*v` and the
    decay at the end of the update before, with the hyper-parameters of then: a change
    reaches them one update late. Clipping sees what is multiplied by `lr/vs`, and
    leaves the stored velocity alone.

    Attributes:
        is_combined: Whether velocity and accumulated gradient are one tensor.
        velocity_type: The velocity's type; None means the weight's.
    """

    is_combined: bool
    velocity_type: torch.dtype | None

    def scalars(
        self, variables: GroupVariables, scaling: Variable
    ) -> dict[str, Variable]:
        """Derive the factors of the formulas' terms."""
        velocity = variables.velocity_scaling if self.is_combined else scaling
        dampening, decay = variables.dampening, variables.weight_decay
        return {
            "scaledLearningRate1": derived(
                lambda lr, vs: lr / vs, variables.lr, velocity
            ),
            "scaledMomentum1": variables.momentum,
            "dampeningScaleFactor1": derived(
                lambda dm, vs, ls: (1.0 - dm) * (vs / ls), dampening, velocity, scaling
            ),
            "scaledWeightDecay1": derived(
                lambda dm, wd, vs: (1.0 - dm) * wd * vs, dampening, decay, velocity
            ),
            "nesterov": variables.nesterov,
            "nesterovGradientScaleFactor1": derived(
                lambda vs, ls: vs / ls, velocity, scaling
            ),
            "nesterovWeightDecay1": derived(lambda wd, vs: wd * vs, decay, velocity),
        }

    def initial_state(
        self, weight: Tensor, scalars: Mapping[str, Variable]
    ) -> WeightState:
        """Make a velocity of zero, with the first decay in it if combined."""
        velocity = torch.zeros_like(weight, dtype=self.velocity_type or weight.dtype)
        if self.is_combined:
            velocity.copy_(
                weight.detach().float() * scalars["scaledWeightDecay1"].value
            )
        return {"Accl1": velocity}

    def directions(self, group: WeightGroup, gradients: list[Tensor]) -> list[Tensor]:
        """Update the velocity and give what to subtract.

        If one pass will do both, nothing is done yet: the gradients as they are.
        """
        if self._kernel(group) is not None:
            return gradients
        scalars = group.scalars
        velocity = group.load("Accl1")
        if not self.is_combined:
            self._carry_over(group, velocity)
        torch._foreach_add_(velocity, gradients, alpha=scalars["dampeningScaleFactor1"])
        velocity = group.store("Accl1", velocity)
        if not scalars["nesterov"]:
            return velocity
        ahead = list(torch._foreach_mul(velocity, scalars["scaledMomentum1"]))
        gradient_factor = scalars["nesterovGradientScaleFactor1"]
        torch._foreach_add_(ahead, gradients, alpha=gradient_factor)
        if scalars["nesterovWeightDecay1"]:
            weights = widened(group.weights)
            torch._foreach_add_(ahead, weights, alpha=scalars["nesterovWeightDecay1"])
        return ahead

    def apply(self, group: WeightGroup, directions: list[Tensor]) -> None:
        """Subtract, and if combined prepare the next update's velocity."""
        scalars, kernel = group.scalars, self._kernel(group)
        if kernel is not None:
            kernel(
                group.weights,
                group.laid_out(directions),
                group.state["Accl1"],
                weight_decay=scalars["nesterovWeightDecay1"],
                momentum=scalars["scaledMomentum1"],
                lr=scalars["scaledLearningRate1"],
                dampening=1.0 - scalars["dampeningScaleFactor1"],
                nesterov=bool(scalars["nesterov"]),
                maximize=False,
                is_first_step=False,
            )
            return
        weights = widened(group.weights)
        step_size = scalars["scaledLearningRate1"]
        torch._foreach_add_(weights, directions, alpha=-step_size)
        write(group.weights, weights)
        if self.is_combined:
            velocity = group.load("Accl1")
            self._carry_over(group, velocity)
            group.store("Accl1", velocity)

    def _kernel(self, group: WeightGroup) -> _fused_kernels.Kernel | None:
        """Find the kernel that does the same, in one pass.

        It puts the decay into the gradient: the factors of the two, and those of
        Nesterov's sum, must agree. Loaded ones needn't.
        """
        if self.is_combined or group.is_clipped or not group.suits_kernels:
            return None
        scalars = group.scalars
        share = scalars["dampeningScaleFactor1"] * scalars["nesterovWeightDecay1"]
        is_same = (
            scalars["scaledMomentum1"] != 0.0  # else it takes no velocity
            and scalars["nesterovGradientScaleFactor1"] == 1.0
            and math.isclose(share, scalars["scaledWeightDecay1"])
        )
        return _fused_kernels.sgd() if is_same else None

    def _carry_over(self, group: WeightGroup, velocity: list[Tensor]) -> None:
        torch._foreach_mul_(velocity, group.scalars["scaledMomentum1"])
        decay = group.scalars["scaledWeightDecay1"]
        if decay:
            torch._foreach_add_(velocity, widened(group.weights), alpha=decay)
