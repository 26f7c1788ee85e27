# SPDX-License-Identifier: Apache-2.0
"""An optimiser's update as a function of tensors, for machine code.

Rules compute here with one weight at a time: a compiler makes one loop of all of them.
Hyper-parameters are inputs, since they may change from call to call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Sequence

import torch
from torch import Tensor

from ipufit.emulator._device.gradients import GradientReduction
from ipufit.emulator._update.operations import TRACED, clip_traced
from ipufit.emulator._update.rule import STEP, WEIGHT, Operands
from ipufit.emulator._update.weight_group import WeightGroup

if TYPE_CHECKING:
    from ipufit.emulator._update.device_optimizer import DeviceOptimizer

Tensors = Sequence[Tensor]

_REDUCTION = ("scale", "divisor", "ratio")
"""The numbers in a row before those of the optimiser."""


@dataclass(frozen=True)
class Update:
    """An optimiser's update of the weights, of flat lists of tensors.

    Attributes:
        groups: The weights that are updated together. Only their rules, names and slots
            of the state count, not their tensors.
        max_grad_norm: Largest global norm; infinite without clipping.
    """

    groups: tuple[WeightGroup, ...]
    max_grad_norm: float

    def is_of(self, groups: Sequence[WeightGroup]) -> bool:
        """Say whether other groups need the same function."""
        shapes = [_shape(group) for group in groups]
        return [_shape(group) for group in self.groups] == shapes

    @property
    def origin(self) -> tuple[object, ...]:
        """The rules, names and states of its weights, with a `repr` that says all."""
        return tuple(map(_shape, self.groups)), self.max_grad_norm

    @property
    def num_values(self) -> int:
        """The length of a row of `table`."""
        counts = (len(group.all_numbers(1.0)) for group in self.groups)
        return len(_REDUCTION) + sum(counts)

    def table(
        self,
        optimizer: DeviceOptimizer,
        groups: Sequence[WeightGroup],
        reduction: GradientReduction,
        updates: int,
    ) -> Tensor:
        """Compute the numbers of the next updates: a row for each.

        Args:
            optimizer: The device's.
            groups: Groups of which `is_of` is true.
            reduction: How gradients are reduced over the micro-batches.
            updates: Number of updates.
        """
        first = [reduction.scale, float(reduction.divisor), optimizer.gradient_ratio]
        rows = []
        for index in range(updates):
            row = list(first)
            for group in groups:
                step = group.step + 1.0 + index
                row += group.all_numbers(step).values()
            rows.append(row)
        return torch.tensor(rows, dtype=torch.float32)

    def apply(
        self, weights: Tensors, states: Tensors, values: Tensor, gradients: Tensors
    ) -> None:
        """Update weights and states in place.

        Args:
            weights: The weights of all groups, one after the other.
            states: Their state, in the order of `states`.
            values: A row of the table.
            gradients: For each weight, the sum over the micro-batches.
        """
        numbers = iter(values.unbind(0))
        _, divisor, ratio = (next(numbers) for _ in _REDUCTION)
        remaining = zip(weights, gradients)
        left = iter(states)
        rules, operands, directions = [], [], []
        for group in self.groups:
            n = {name: next(numbers) for name in group.all_numbers(1.0)}
            for _ in group.names:
                weight, gradient = next(remaining)
                tensors = {slot: next(left) for slot in _slots(group)}
                given = Operands(TRACED, {WEIGHT: weight, **tensors}, n)
                rules.append(group.rule)
                operands.append(given)
                direction = group.rule.direction(given, gradient / divisor * ratio)
                directions.append(direction)
        if not math.isinf(self.max_grad_norm):
            directions = clip_traced(directions, self.max_grad_norm)
        for rule, given, direction in zip(rules, operands, directions):
            rule.update(given, direction)


def states(groups: Sequence[WeightGroup]) -> list[Tensor]:
    """Give the state tensors of groups, weight by weight."""
    return [
        group.state[slot][index]
        for group in groups
        for index in range(len(group.names))
        for slot in _slots(group)
    ]


def _slots(group: WeightGroup) -> list[str]:
    return [slot for slot in group.state if slot != STEP]


def _shape(group: WeightGroup) -> tuple[object, ...]:
    return group.rule, tuple(group.names), tuple(group.state)
