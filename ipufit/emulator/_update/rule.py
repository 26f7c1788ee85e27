# SPDX-License-Identifier: Apache-2.0
"""The protocol of an optimiser's rule, and what the families of rules share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Callable, Dict, Mapping, MutableMapping

from torch import Tensor

from ipufit.emulator._optimizers.kinds import OptimizerKind
from ipufit.emulator._optimizers.values import (
    GroupVariables,
    OptimizerSettings,
    Variable,
)
from ipufit.emulator._update.operations import Number, Operations, Values

# The optimiser state of one weight, by PopART's name of the tensor.
WeightState = Dict[str, Tensor]
Scalars = Dict[str, Variable]

WEIGHT = "weight"
STEP = "Step"
"""The state tensor that counts the updates of a weight."""


@dataclass
class Operands:
    """All that a rule computes with, but gradients.

    Attributes:
        ops: The operations.
        tensors: The weights, as `WEIGHT`, and their state by slot, without `STEP`. They
            are read in float32 and written in their own type: read again what was
            written.
        n: The numbers of `UpdateRule.scalars`, and `lossScaling`; for `update` those of
            `UpdateRule.factors`, too.
    """

    ops: Operations
    tensors: MutableMapping[str, Values]
    n: Mapping[str, Number]

    def __getitem__(self, slot: str) -> Values:
        return self.tensors[slot]

    def __setitem__(self, slot: str, values: Values) -> None:
        self.tensors[slot] = values


class UpdateRule(ABC):
    """An optimiser's arithmetic, for weights whose state it lays out.

    An update has two halves: between them the device clips what the first one returns
    (PopART, `clipweightgradientsbynorm.cpp`). Both work on all weights of a group at
    once. Rules don't write to gradients, which may share memory. They compare equal if
    they are the same program.
    """

    @abstractmethod
    def scalars(self, variables: GroupVariables, scaling: Variable) -> Scalars:
        """Derive the values the device holds, by PopART's names."""

    @abstractmethod
    def initial_state(self, weight: Tensor, scalars: Scalars) -> WeightState:
        """Make the state of a weight before its first update."""

    def factors(self, n: Mapping[str, float], step: float) -> dict[str, float]:
        """Compute what else the formulas take, in double precision.

        Args:
            n: The values of `scalars`.
            step: The number of this update, from 1.
        """
        return {}

    @abstractmethod
    def direction(self, given: Operands, gradients: Values) -> Values:
        """Turn gradients into what gradient clipping applies to.

        Args:
            given: Weights, state and values to compute with.
            gradients: In float32, of the loss times the loss scaling.
        """

    @abstractmethod
    def update(self, given: Operands, direction: Values) -> None:
        """Update the weights, and the state that clipping has an effect on."""


Rules = Dict[OptimizerKind, Callable[[OptimizerSettings, GroupVariables], UpdateRule]]
"""By kind: what makes the rule of a weight from the values of its parameter group."""


def unscaled(given: Operands, gradients: Values) -> Values:
    """Take the loss scaling out of gradients."""
    ops, n = given.ops, given.n
    scaling = n["lossScaling"]
    if not ops.may_differ(scaling, 1.0):
        return gradients
    return ops.div(gradients, scaling)


def with_penalty(given: Operands, gradients: Values) -> Values:
    """Add the weight decay to gradients."""
    ops, n = given.ops, given.n
    decay = n["weightDecay"]
    if not ops.may_differ(decay, 0.0):
        return gradients
    return ops.add(gradients, given[WEIGHT], alpha=decay)


def derived(function: Callable[..., float], *variables: Variable) -> Variable:
    """Compute a value that is constant if all it comes from is.

    Example:
        >>> derived(lambda a, b: a * b, Variable(2.0, True), Variable(3.0, False))
        Variable(value=6.0, is_const=False)
    """
    value = function(*(variable.value for variable in variables))
    return Variable(value, all(variable.is_const for variable in variables))


def bias_correction(beta: float, step: float) -> float:
    """Compute `1 - beta^step`; NaN, as on a device, for a loaded step below 1."""
    try:
        return 1.0 - math.pow(beta, step)
    except ValueError:
        return math.nan


def square_root(value: float) -> float:
    """Compute the root; NaN of a negative number, as on a device."""
    return math.sqrt(value) if value >= 0.0 else math.nan
