# SPDX-License-Identifier: Apache-2.0
"""The optimisers that the device has, and which of them stands for an object.

Accepted are PopTorch's optimisers, torch's SGD, Adam, AdamW and RMSprop, and classes
derived from them, which count as what they derive from. PopTorch 3.4 decides by
`isinstance`; AdamW is tried before Adam, because newer torch derives it from Adam.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Callable

import torch

from ipufit.emulator._optimizers.lamb import LAMB
from ipufit.emulator._optimizers.optimizers import AdamW

_ADAM = ("lr", "betas", "eps", "weight_decay")
_SGD = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
_RMSPROP = ("lr", "momentum", "weight_decay", "alpha", "eps")


class OptimizerKind(Enum):
    """One of the optimisers that the device has.

    Attributes:
        family: Name of its family in PopTorch.
        mode: Its name within the family; both decide the program.
        variables: Names of the values that are read of each parameter group.
        clips: Whether it can clip gradients by their global norm.
        weight_decay: The default of torch's optimiser.
    """

    SGD1 = ("SGD", "combined", (*_SGD, "velocity_scaling"), True)
    SGD2 = ("SGD", "separate", _SGD, True)
    ADAM = ("Adam", "Adam", _ADAM, True)
    ADAMW = ("Adam", "AdamW", _ADAM, True, 0.01)
    # The device corrects the bias all the same: the mode is AdamW's.
    ADAMW_NO_BIAS = ("Adam", "AdamW", _ADAM, True, 0.01, "no bias correction")
    LAMB = ("Adam", "Lamb", (*_ADAM, "max_weight_norm"))
    LAMB_NO_BIAS = ("Adam", "LambNoBias", (*_ADAM, "max_weight_norm"))
    RMSPROP = ("Adaptive", "RMSProp", _RMSPROP)
    RMSPROP_CENTERED = ("Adaptive", "CenteredRMSProp", _RMSPROP)

    # The last argument only keeps two values apart: equal ones would be one member.
    def __init__(
        self,
        family: str,
        mode: str,
        variables: tuple[str, ...],
        clips: bool = False,
        weight_decay: float = 0.0,
        asked: str = "",
    ) -> None:
        self.family = family
        self.mode = mode
        self.variables = variables
        self.clips = clips
        self.weight_decay = weight_decay

    @property
    def ordinary(self) -> dict[str, float]:
        """Values that torch's optimisers have if nothing was given.

        Torch's optimisers don't tell what was given, so these count as constants.
        """
        return {
            "weight_decay": self.weight_decay,
            "momentum": 0.0,
            "dampening": 0.0,
            "velocity_scaling": 1.0,
            "eps": 1e-8,
        }


def optimizer_kind(optimizer: torch.optim.Optimizer) -> OptimizerKind:
    """Say which of the device's optimisers stands for an optimiser object.

    Raises:
        AssertionError: If there is none, or RMSprop's groups want different ones.

    Example:
        >>> weights = [torch.nn.Parameter(torch.zeros(2))]
        >>> optimizer_kind(torch.optim.AdamW(weights)).name
        'ADAMW'
    """
    for optimizer_class, kind in _KINDS:
        if isinstance(optimizer, optimizer_class):
            return kind(optimizer)
    raise AssertionError(
        "Unsupported optimizer type. Types supported are poptorch.optim's SGD, Adam, "
        "AdamW, RMSprop and LAMB, and torch.optim's SGD, Adam, AdamW and RMSprop; got "
        f"{type(optimizer).__name__}."
    )


def _sgd(optimizer: Any) -> OptimizerKind:
    is_combined = getattr(optimizer, "use_combined_accum", False)
    return OptimizerKind.SGD1 if is_combined else OptimizerKind.SGD2


def _adamw(optimizer: Any) -> OptimizerKind:
    corrects = not isinstance(optimizer, AdamW) or optimizer.bias_correction
    return OptimizerKind.ADAMW if corrects else OptimizerKind.ADAMW_NO_BIAS


def _lamb(optimizer: Any) -> OptimizerKind:
    corrects = optimizer.bias_correction
    return OptimizerKind.LAMB if corrects else OptimizerKind.LAMB_NO_BIAS


def _rmsprop(optimizer: Any) -> OptimizerKind:
    centered = {bool(group.get("centered")) for group in optimizer.param_groups}
    if len(centered) > 1:
        raise AssertionError(
            "All parameter groups must have the same value for the 'centered' "
            "attribute: the device has one RMSprop for all of them."
        )
    if centered == {True}:
        return OptimizerKind.RMSPROP_CENTERED
    return OptimizerKind.RMSPROP


_KINDS: tuple[tuple[type, Callable[[Any], OptimizerKind]], ...] = (
    (torch.optim.SGD, _sgd),
    (torch.optim.AdamW, _adamw),
    (torch.optim.Adam, lambda optimizer: OptimizerKind.ADAM),
    (torch.optim.RMSprop, _rmsprop),
    (LAMB, _lamb),
)
