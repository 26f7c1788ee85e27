# SPDX-License-Identifier: Apache-2.0
"""PopTorch's optimisers: `poptorch.optim`.

Each is torch's optimiser of the same name with a few arguments more; LAMB, which torch
hasn't got, comes with a host implementation of its own. A training executor reads their
values and never calls `step`; on the host they step as torch's do and ignore what they
have more. Arguments left None take the default *and* become constants of the compiled
program: see `VariableAttributes`.

The arguments, their order and their defaults are those of PopTorch 3.4 (PopTorch user
guide, "Optimizers").
"""

from __future__ import annotations

from typing import Any, Iterable

import torch

from ipufit.emulator._optimizers.base import (
    Optimizer,
    logger,
    torch_arguments,
)
from ipufit.emulator._optimizers.lamb import LAMB

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "RMSprop"]


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent, with momentum if it isn't a constant zero.

    On the device dampening counts from the first step on and without momentum too,
    unlike in torch.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate; always variable, since it must be given.
        momentum: Factor of the velocity, 0 by default.
        dampening: Lessens what a gradient adds to the velocity, 0 by default.
        weight_decay: L2 penalty, 0 by default.
        nesterov: Whether to look ahead; off by default.
        maximize: Honoured on the host only.
        foreach: Honoured on the host only.
        differentiable: Honoured on the host only.
        loss_scaling: Factor of the loss, taken out before the update; 1 by default.
        velocity_scaling: Factor of the stored velocity, 1 by default; only with
            `use_combined_accum`.
        use_combined_accum: Keep accumulated gradient and velocity in one tensor.
        accum_type: Type of the accumulated gradient, float32 by default.
        velocity_accum_type: Type of the velocity, float32 by default.
        max_grad_norm: Largest global norm; infinite by default.

    Raises:
        AssertionError: If an accumulation type is neither float32 nor float16.

    Example:
        >>> optimizer = SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
        >>> optimizer.variable_attrs.isConstant("momentum")
        False
        >>> optimizer.variable_attrs.isConstant("weight_decay")
        True
    """

    use_combined_accum: bool
    accum_type: torch.dtype
    velocity_accum_type: torch.dtype
    max_grad_norm: float

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        arguments = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
        }
        super().__init__(params, **torch_arguments(torch.optim.SGD, arguments))
        if use_combined_accum:
            arguments["velocity_scaling"] = velocity_scaling
            self._add_velocity_scaling(velocity_scaling)
        elif velocity_scaling is not None:
            logger.warning(
                "Ignoring velocity_scaling=%s: it needs use_combined_accum=True",
                velocity_scaling,
            )
        self._record(
            arguments,
            loss_scaling,
            use_combined_accum=use_combined_accum,
            accum_type=accum_type,
            velocity_accum_type=velocity_accum_type,
            max_grad_norm=max_grad_norm,
        )

    def _add_velocity_scaling(self, velocity_scaling: float | None) -> None:
        value = 1.0 if velocity_scaling is None else velocity_scaling
        self.defaults["velocity_scaling"] = value
        for group in self.param_groups:
            group.setdefault("velocity_scaling", value)


class Adam(Optimizer, torch.optim.Adam):
    """Adam, with the weight decay added to the gradient.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate, 1e-3 by default; constant unless given.
        betas: Pair of decay rates, (0.9, 0.999) by default.
        eps: Added to the denominator, 1e-8 by default.
        weight_decay: L2 penalty, 0 by default.
        amsgrad: Refused by training executors.
        foreach: Honoured on the host only.
        maximize: Honoured on the host only.
        capturable: Honoured on the host only.
        differentiable: Honoured on the host only.
        fused: Honoured on the host only.
        loss_scaling: Factor of the loss, taken out before the update; 1 by default.
        accum_type: Type of the accumulated gradient, float32 by default.
        first_order_momentum_accum_type: Type of the mean, float32 by default.
        second_order_momentum_accum_type: Type of the squares' mean, float32 by default.
        max_grad_norm: Largest global norm of the gradients; infinite by default.

    Raises:
        AssertionError: If an accumulation type is neither float32 nor float16.

    Example:
        >>> optimizer = Adam([torch.nn.Parameter(torch.zeros(2))])
        >>> optimizer.variable_attrs.isConstant("lr")
        True
    """

    accum_type: torch.dtype
    first_order_momentum_accum_type: torch.dtype
    second_order_momentum_accum_type: torch.dtype
    max_grad_norm: float

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        arguments = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "foreach": foreach,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, **torch_arguments(torch.optim.Adam, arguments))
        self._record(
            arguments,
            loss_scaling,
            accum_type=accum_type,
            first_order_momentum_accum_type=first_order_momentum_accum_type,
            second_order_momentum_accum_type=second_order_momentum_accum_type,
            max_grad_norm=max_grad_norm,
        )


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with the weight decay apart from the gradient.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate, 1e-3 by default; constant unless given.
        betas: Pair of decay rates, (0.9, 0.999) by default.
        eps: Added to the denominator, 1e-8 by default.
        weight_decay: Decay of the weights, 1e-2 by default.
        amsgrad: Refused by training executors.
        maximize: Honoured on the host only.
        foreach: Honoured on the host only.
        capturable: Honoured on the host only.
        differentiable: Honoured on the host only.
        fused: Honoured on the host only.
        loss_scaling: Factor of the loss, taken out before the update; 1 by default.
        bias_correction: Has no effect: the device corrects the bias either way.
        accum_type: Type of the accumulated gradient, float32 by default.
        first_order_momentum_accum_type: Type of the mean, float32 by default.
        second_order_momentum_accum_type: Type of the squares' mean, float32 by default.
        max_grad_norm: Largest global norm of the gradients; infinite by default.

    Raises:
        AssertionError: If an accumulation type is neither float32 nor float16.

    Example:
        >>> AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.1).bias_correction
        True
    """

    bias_correction: bool
    accum_type: torch.dtype
    first_order_momentum_accum_type: torch.dtype
    second_order_momentum_accum_type: torch.dtype
    max_grad_norm: float

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        arguments = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, **torch_arguments(torch.optim.AdamW, arguments))
        self._record(
            arguments,
            loss_scaling,
            bias_correction=bias_correction,
            accum_type=accum_type,
            first_order_momentum_accum_type=first_order_momentum_accum_type,
            second_order_momentum_accum_type=second_order_momentum_accum_type,
            max_grad_norm=max_grad_norm,
        )


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop, as torch or as TensorFlow defines it.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate, 1e-2 by default; constant unless given.
        alpha: Decay rate of the squares' mean, 0.99 by default.
        eps: Added to the denominator, 1e-8 by default.
        weight_decay: L2 penalty, 0 by default.
        momentum: Factor of the velocity, 0 by default.
        centered: Divide by the variance instead; off by default, equal in all groups.
        foreach: Honoured on the host only.
        maximize: Honoured on the host only.
        differentiable: Honoured on the host only.
        loss_scaling: Factor of the loss, taken out before the update; 1 by default.
        accum_type: Type of the accumulated gradient, float32 by default.
        first_order_momentum_accum_type: Type of the first mean, float32 by default.
        second_order_momentum_accum_type: Type of the second mean, float32 by default.
        use_tf_variant: On the device, start the squares' mean at one, put `eps` inside
            the root and `lr` inside the velocity; off by default.

    Raises:
        AssertionError: If an accumulation type is neither float32 nor float16.

    Example:
        >>> RMSprop([torch.nn.Parameter(torch.zeros(2))]).use_tf_variant
        False
    """

    accum_type: torch.dtype
    first_order_momentum_accum_type: torch.dtype
    second_order_momentum_accum_type: torch.dtype
    use_tf_variant: bool

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
    ) -> None:
        arguments = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
            "foreach": foreach,
            "maximize": maximize,
            "differentiable": differentiable,
        }
        super().__init__(params, **torch_arguments(torch.optim.RMSprop, arguments))
        self._record(
            arguments,
            loss_scaling,
            accum_type=accum_type,
            first_order_momentum_accum_type=first_order_momentum_accum_type,
            second_order_momentum_accum_type=second_order_momentum_accum_type,
            use_tf_variant=use_tf_variant,
        )
