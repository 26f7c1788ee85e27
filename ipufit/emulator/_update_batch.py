# SPDX-License-Identifier: Apache-2.0
"""Weights that are updated together, and the protocol of the rules that do it.

All arithmetic is in float32. Tensors of another type are widened, worked on and written
back; float32 ones are worked on in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Callable, Dict, Mapping, Sequence

import torch
from torch import Tensor

from ._half import to_half
from ._optimizer_values import GroupVariables, Variable

# The optimiser state of one weight, by PopART's name of the tensor.
WeightState = Dict[str, Tensor]


@dataclass
class Batch:
    """Weights with the same rule, hyper-parameters and number of updates.

    Attributes:
        rule: How they are updated.
        names: Their names.
        weights: The device's tensors.
        state: Their state tensors, by slot.
        scalars: The hyper-parameters, as `rule` names them.
        loss_scaling: What gradients are multiplied by.
        step: The number of updates so far, where `rule` counts them.
    """

    rule: UpdateRule
    names: list[str]
    weights: list[Tensor]
    state: dict[str, list[Tensor]]
    scalars: Mapping[str, float]
    loss_scaling: float
    step: float

    def load(self, slot: str) -> list[Tensor]:
        """Give state tensors in float32, themselves if that is their type."""
        return widened(self.state[slot])

    def store(self, slot: str, values: Sequence[Tensor]) -> list[Tensor]:
        """Write state tensors; give what was kept of the values, in float32."""
        write(self.state[slot], values)
        return self.load(slot)

    def next_step(self) -> float:
        """Count an update and give the new number."""
        torch._foreach_add_(self.state["Step"], 1.0)
        self.step += 1.0
        return self.step

    def unscaled(self, gradients: list[Tensor]) -> list[Tensor]:
        """Take the loss scaling out of gradients."""
        if self.loss_scaling == 1.0:
            return gradients
        return list(torch._foreach_div(gradients, self.loss_scaling))


class UpdateRule(ABC):
    """An optimiser's arithmetic, for weights whose state it lays out.

    An update has two halves: between them the device clips what the first one returns
    (PopART, `clipweightgradientsbynorm.cpp`). Rules don't write to gradients, which
    may share memory. They compare equal if they are the same program.
    """

    @abstractmethod
    def scalars(
        self, variables: GroupVariables, scaling: Variable
    ) -> dict[str, Variable]:
        """Derive the values the device holds, by PopART's names."""

    @abstractmethod
    def initial_state(
        self, weight: Tensor, scalars: Mapping[str, Variable]
    ) -> WeightState:
        """Make the state of a weight before its first update."""

    @abstractmethod
    def directions(self, batch: Batch, gradients: list[Tensor]) -> list[Tensor]:
        """Turn float32 gradients into what gradient clipping applies to."""

    @abstractmethod
    def apply(self, batch: Batch, directions: list[Tensor]) -> None:
        """Update the weights, and the state that clipping has an effect on."""


def derived(function: Callable[..., float], *variables: Variable) -> Variable:
    """Compute a value that is constant if all it comes from is.

    Example:
        >>> derived(lambda a, b: a * b, Variable(2.0, True), Variable(3.0, False))
        Variable(value=6.0, is_const=False)
    """
    value = function(*(variable.value for variable in variables))
    return Variable(value, all(variable.is_const for variable in variables))


def widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Give tensors in float32, themselves if that is their type."""
    return [tensor.float() for tensor in tensors]


def write(stored: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write float32 values into tensors of any type, unless computed in place."""
    for tensor, value in zip(stored, values):
        if tensor is not value:
            is_half = tensor.dtype == torch.float16
            tensor.copy_(to_half(value) if is_half else value)
