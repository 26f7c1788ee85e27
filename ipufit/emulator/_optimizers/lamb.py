# SPDX-License-Identifier: Apache-2.0
"""LAMB, the one optimiser of PopTorch's that torch doesn't have."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping

import torch
from torch import Tensor

from ipufit.emulator._optimizers.base import ATTRIBUTES, Optimizer

_DEFAULTS = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "max_weight_norm": ATTRIBUTES["max_weight_norm"],
}


class LAMB(Optimizer, torch.optim.Optimizer):
    """Layer-wise adaptive moments: Adam's step, scaled by each weight's norm.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes", 2020.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate, 1e-3 by default; constant unless given.
        betas: Pair of decay rates, (0.9, 0.999) by default.
        eps: Added to the denominator, 1e-8 by default.
        weight_decay: Decay of the weights, 1e-2 by default.
        bias_correction: Whether to correct the means' bias; on by default.
        loss_scaling: Factor of the loss, taken out before the update; 1 by default.
        max_weight_norm: Largest norm of a weight in the trust ratio, 65500 by default.
            On the host the constructor's value serves all groups.
        accum_type: Type of the accumulated gradient, float32 by default.
        first_order_momentum_accum_type: Type of the mean, float32 by default.
        second_order_momentum_accum_type: Type of the squares' mean, float32 by default.

    Raises:
        ValueError: If a value is negative, or a beta not below 1.
        AssertionError: If an accumulation type is neither float32 nor float16.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> weight.grad = torch.ones(4)
        >>> LAMB([weight], lr=0.5, weight_decay=0.0).step()
        >>> weight.data
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    bias_correction: bool
    max_weight_norm: float
    accum_type: torch.dtype
    first_order_momentum_accum_type: torch.dtype
    second_order_momentum_accum_type: torch.dtype

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        arguments = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_weight_norm": max_weight_norm,
        }
        given = {name: value for name, value in arguments.items() if value is not None}
        defaults = {**_DEFAULTS, **given}
        _check(defaults)
        torch.optim.Optimizer.__init__(self, params, defaults)
        self._record(
            arguments,
            loss_scaling,
            bias_correction=bias_correction,
            max_weight_norm=max_weight_norm,
            accum_type=accum_type,
            first_order_momentum_accum_type=first_order_momentum_accum_type,
            second_order_momentum_accum_type=second_order_momentum_accum_type,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters on the host, from their `grad`.

        Args:
            closure: Computes the loss and the gradients anew.

        Returns:
            What the closure returned, or None.

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> LAMB([weight]).step()  # no gradient, no update
            >>> weight.data
            tensor([1.])
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(
        self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]
    ) -> None:
        state: Any = self.state[parameter]  # type: ignore[index,unused-ignore]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        mean, squares = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if self.bias_correction:
            mean = mean / (1 - beta1 ** state["step"])
            squares = squares / (1 - beta2 ** state["step"])
        direction = mean / squares.sqrt().add_(group["eps"])
        direction.add_(parameter, alpha=group["weight_decay"])
        ratio = _trust_ratio(parameter, direction, self.max_weight_norm)
        parameter.add_(direction, alpha=-group["lr"] * ratio)


def _trust_ratio(weight: Tensor, direction: Tensor, max_weight_norm: float) -> float:
    weight_norm = min(float(weight.norm()), max_weight_norm)
    direction_norm = float(direction.norm())
    if weight_norm == 0.0 or direction_norm == 0.0:
        return 1.0
    return weight_norm / direction_norm


def _check(values: Mapping[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay", "max_weight_norm"):
        if not values[name] >= 0.0:
            raise ValueError(f"LAMB's {name} must not be negative, got {values[name]}.")
    for beta in values["betas"]:
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"LAMB's betas must lie in [0, 1), got {values['betas']}.")
