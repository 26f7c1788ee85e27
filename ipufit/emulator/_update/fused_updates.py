# SPDX-License-Identifier: Apache-2.0
"""Which rules torch has a fused kernel for, and with what numbers it is the same.

Rules need none of this: a kernel only does in one pass over the memory what the formula
of a rule does in several.
"""

from __future__ import annotations

import math
from typing import Callable

from ipufit.emulator._update import fused_kernels as _fused_kernels
from ipufit.emulator._update.adaptive import AdamRule
from ipufit.emulator._update.fused_kernels import FusedUpdate
from ipufit.emulator._update.rule import UpdateRule
from ipufit.emulator._update.sgd import MomentumSGD, PlainSGD
from ipufit.emulator._update.weight_group import WeightGroup


def fused_update(group: WeightGroup, is_clipped: bool) -> FusedUpdate | None:
    """Find a kernel that does the same as the rule of a group.

    Args:
        group: Weights, and the numbers that they are updated with.
        is_clipped: Whether what is subtracted may be clipped first.
    """
    find = _FINDERS.get(type(group.rule))
    return find(group, is_clipped) if find and group.suits_kernels else None


def _adam(group: WeightGroup, is_clipped: bool) -> FusedUpdate | None:
    kernel, n = _fused_kernels.adamw(), group.numbers
    beta1, beta2 = n["beta1"], n["beta2"]
    # Loaded values that make no sense give NaN, not what the kernel makes of them.
    makes_sense = 0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0 and group.step >= 0.0
    if kernel is None or not makes_sense:
        return None
    is_penalty = isinstance(group.rule, AdamRule) and group.rule.decays_gradient
    counters = [group.counter] * len(group.weights)
    numbers = {
        "lr": n["learningRate"],
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": 0.0 if is_penalty else n["weightDecay"],
        "eps": n["eps"],
        "amsgrad": False,
        "maximize": False,
    }
    first, second = group.state["Accl1"], group.state["Accl2"]
    return FusedUpdate(kernel, (first, second, [], counters), numbers)


def _plain_sgd(group: WeightGroup, is_clipped: bool) -> FusedUpdate | None:
    kernel, n = _fused_kernels.sgd(), group.numbers
    step_size = n["scaledLearningRate0"]
    if kernel is None or not step_size:
        return None
    decay = (1.0 - n["weightDecayScaleFactor0"]) / step_size
    numbers = _sgd_numbers(lr=step_size, weight_decay=decay)
    return FusedUpdate(kernel, ([],), numbers)


def _momentum_sgd(group: WeightGroup, is_clipped: bool) -> FusedUpdate | None:
    """Find the kernel that updates velocity and weights in one pass.

    It puts the decay into the gradient: the factors of the two, and those of Nesterov's
    sum, must agree. Loaded ones needn't.
    """
    kernel, n = _fused_kernels.sgd(), group.numbers
    is_combined = isinstance(group.rule, MomentumSGD) and group.rule.is_combined
    if kernel is None or is_combined or is_clipped:
        return None
    share = n["dampeningScaleFactor1"] * n["nesterovWeightDecay1"]
    is_same = (
        n["scaledMomentum1"] != 0.0  # else it takes no velocity
        and n["nesterovGradientScaleFactor1"] == 1.0
        and math.isclose(share, n["scaledWeightDecay1"])
    )
    if not is_same:
        return None
    numbers = _sgd_numbers(
        lr=n["scaledLearningRate1"],
        weight_decay=n["nesterovWeightDecay1"],
        momentum=n["scaledMomentum1"],
        dampening=1.0 - n["dampeningScaleFactor1"],
        nesterov=bool(n["nesterov"]),
    )
    return FusedUpdate(kernel, (group.state["Accl1"],), numbers, takes_gradients=True)


def _sgd_numbers(**numbers: float) -> dict[str, float]:
    ordinary = {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
    return {**ordinary, "maximize": False, "is_first_step": False, **numbers}


_FINDERS: dict[type[UpdateRule], Callable[[WeightGroup, bool], FusedUpdate | None]] = {
    AdamRule: _adam,
    PlainSGD: _plain_sgd,
    MomentumSGD: _momentum_sgd,
}
