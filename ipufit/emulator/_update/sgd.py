# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent as the device does it (PopART, `sgd.hpp`).

In the formulas `a` is a gradient of the scaled loss, `ls` the loss scaling, `vs` the
velocity scaling, `mm` momentum, `dm` dampening, `wd` weight decay.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    WEIGHT,
    Operands,
    Rules,
    Scalars,
    UpdateRule,
    WeightState,
    derived,
)


@dataclass(frozen=True)
class PlainSGD(UpdateRule):
    """SGD of weights whose momentum is a constant zero: there is no velocity.

    `w <- w * (1 - lr*(1-dm)*wd) - lr*(1-dm)/ls * a`. Clipping sees `a`, which is still
    multiplied by the loss scaling.
    """

    def scalars(self, variables: GroupVariables, scaling: Variable) -> Scalars:
        """Derive `scaledLearningRate0` and `weightDecayScaleFactor0`."""
        lr, dampening = variables.lr, variables.dampening
        decay = variables.weight_decay
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

    def initial_state(self, weight: Tensor, scalars: Scalars) -> WeightState:
        """Make no state."""
        return {}

    def direction(self, given: Operands, gradients: Values) -> Values:
        """Give the gradients as they are."""
        return gradients

    def update(self, given: Operands, direction: Values) -> None:
        """Decay the weights and subtract."""
        ops, n, weights = given.ops, given.n, given[WEIGHT]
        if ops.may_differ(n["weightDecayScaleFactor0"], 1.0):
            ops.mul_(weights, n["weightDecayScaleFactor0"])
        ops.add_(weights, direction, alpha=-n["scaledLearningRate0"])
        given[WEIGHT] = weights


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

    def scalars(self, variables: GroupVariables, scaling: Variable) -> Scalars:
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

    def initial_state(self, weight: Tensor, scalars: Scalars) -> WeightState:
        """Make a velocity of zero, with the first decay in it if combined."""
        velocity = torch.zeros_like(weight, dtype=self.velocity_type or weight.dtype)
        if self.is_combined:
            decay = scalars["scaledWeightDecay1"].value
            velocity.copy_(weight.detach().float() * decay)
        return {"Accl1": velocity}

    def direction(self, given: Operands, gradients: Values) -> Values:
        """Update the velocity and give what to subtract."""
        ops, n = given.ops, given.n
        velocity = given["Accl1"]
        if not self.is_combined:
            self._carry_over(given, velocity)
        ops.add_(velocity, gradients, alpha=n["dampeningScaleFactor1"])
        given["Accl1"] = velocity
        velocity = given["Accl1"]

        def ahead() -> Values:
            values = ops.mul(velocity, n["scaledMomentum1"])
            ops.add_(values, gradients, alpha=n["nesterovGradientScaleFactor1"])
            if ops.may_differ(n["nesterovWeightDecay1"], 0.0):
                ops.add_(values, given[WEIGHT], alpha=n["nesterovWeightDecay1"])
            return values

        return ops.choose(n["nesterov"], ahead, velocity)

    def update(self, given: Operands, direction: Values) -> None:
        """Subtract, and if combined begin the next update's velocity."""
        weights = given[WEIGHT]
        step_size = given.n["scaledLearningRate1"]
        given.ops.add_(weights, direction, alpha=-step_size)
        given[WEIGHT] = weights
        if self.is_combined:
            velocity = given["Accl1"]
            self._carry_over(given, velocity)
            given["Accl1"] = velocity

    def _carry_over(self, given: Operands, velocity: Values) -> None:
        ops, n = given.ops, given.n
        ops.mul_(velocity, n["scaledMomentum1"])
        if ops.may_differ(n["scaledWeightDecay1"], 0.0):
            ops.add_(velocity, given[WEIGHT], alpha=n["scaledWeightDecay1"])


def _sgd(
    settings: OptimizerSettings, variables: GroupVariables, is_combined: bool
) -> UpdateRule:
    if variables.momentum == Variable(0.0, is_const=True):
        return PlainSGD()
    velocity_type = None if is_combined else settings.velocity_accum_type
    return MomentumSGD(is_combined, velocity_type)


RULES: Rules = {
    OptimizerKind.SGD1: lambda s, v: _sgd(s, v, is_combined=True),
    OptimizerKind.SGD2: lambda s, v: _sgd(s, v, is_combined=False),
}
