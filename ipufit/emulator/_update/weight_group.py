# SPDX-License-Identifier: Apache-2.0
"""Weights that are updated together, and the protocol of the rules that do it.

All arithmetic is in float32. Tensors of another type are widened, worked on and written
back; float32 ones are worked on in place, by one of torch's fused kernels if that is
the same arithmetic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Callable, Dict, Mapping, Sequence

import torch
from torch import Tensor

from ipufit.emulator._optimizers.values import GroupVariables, Variable
from ipufit.emulator._tracing.half import to_half
from ipufit.emulator._update.fused_kernels import is_dense, same_layout

# The optimiser state of one weight, by PopART's name of the tensor.
WeightState = Dict[str, Tensor]

STEP = "Step"
"""The state tensor that counts the updates of a weight."""


@dataclass
class WeightGroup:
    """Weights with the same rule, hyper-parameters and number of updates.

    Attributes:
        rule: How they are updated.
        names: Their names.
        weights: The device's tensors.
        state: Their state tensors, by slot.
        scalars: The hyper-parameters, as `rule` names them.
        loss_scaling: What gradients are multiplied by.
        is_clipped: Whether what is subtracted may be clipped first.
        step: The number of updates so far, where `rule` counts them. The state tensors
            `Step` learn it from `settle`.
        suits_kernels: Whether all tensors are float32 and laid out alike. Complete
            after `seal`.
    """

    rule: UpdateRule
    names: list[str]
    weights: list[Tensor]
    state: dict[str, list[Tensor]]
    scalars: Mapping[str, float]
    loss_scaling: float
    is_clipped: bool
    step: float
    suits_kernels: bool = False
    _strides: list[tuple[int, ...]] = field(default_factory=list)
    _counter: Tensor | None = None

    def seal(self) -> WeightGroup:
        """Look at the tensors, now that they are complete."""
        self._strides = [weight.stride() for weight in self.weights]
        self._counter = torch.full((), self.step)
        moments = [s for slot, s in self.state.items() if slot != STEP]
        self.suits_kernels = all(map(is_dense, self.weights)) and all(
            tensor.dtype == torch.float32 and tensor.stride() == stride
            for tensors in (self.weights, *moments)
            for tensor, stride in zip(tensors, self._strides)
        )
        return self

    def settle(self) -> None:
        """Write the number of updates into the state."""
        for tensor in self.state.get(STEP, ()):
            tensor.fill_(self.step)

    def load(self, slot: str) -> list[Tensor]:
        """Give state tensors in float32, themselves if that is their type."""
        return widened(self.state[slot])

    def store(self, slot: str, values: Sequence[Tensor]) -> list[Tensor]:
        """Write state tensors; give what was kept of the values, in float32."""
        write(self.state[slot], values)
        return self.load(slot)

    def next_step(self) -> float:
        """Count an update and give the new number."""
        self.step += 1.0
        return self.step

    def counters(self) -> list[Tensor]:
        """The number of updates as fused kernels take it, once for each weight."""
        counter = self._counter
        if counter is None:
            raise RuntimeError("The group isn't sealed.")
        return [counter.fill_(self.step)] * len(self.weights)

    def laid_out(self, gradients: list[Tensor]) -> list[Tensor]:
        """Give gradients in the layout of their weights."""
        return same_layout(gradients, self._strides)

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
    def directions(self, group: WeightGroup, gradients: list[Tensor]) -> list[Tensor]:
        """Turn float32 gradients into what gradient clipping applies to."""

    @abstractmethod
    def apply(self, group: WeightGroup, directions: list[Tensor]) -> None:
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
    return [t if t.dtype is torch.float32 else t.float() for t in tensors]


def write(stored: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write float32 values into tensors of any type, unless computed in place."""
    for tensor, value in zip(stored, values):
        if tensor is not value:
            is_half = tensor.dtype == torch.float16
            tensor.copy_(to_half(value) if is_half else value)
