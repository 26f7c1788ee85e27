# SPDX-License-Identifier: Apache-2.0
"""Weights that are updated together, in one call of each operation.

All arithmetic is in float32. Tensors of another type are widened, worked on and written
back; float32 ones are worked on in place. One of torch's fused kernels does it if that
is the same arithmetic, and if all state is in float32.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence

import torch
from torch import Tensor

from ipufit.emulator._tracing.half import rounds_at_random, to_half
from ipufit.emulator._update.fused_kernels import FusedUpdate, is_dense, same_layout
from ipufit.emulator._update.operations import FOREACH
from ipufit.emulator._update.rule import STEP, WEIGHT, Operands, UpdateRule


class WeightGroup:
    """Weights with the same rule, hyper-parameters and number of updates.

    Args:
        rule: The rule that updates them.
        names: Names of the weights.
        weights: The device's tensors.
        state: For each slot of the state, a tensor for each weight.
        numbers: The hyper-parameters, as `rule` names them, and `lossScaling`.
        step: Number of updates so far.

    Attributes:
        step: Number of updates so far. The state tensors `Step` learn it from `settle`.
        strides: The strides of each weight.
        suits_kernels: Whether all state is float32, and laid out as the weights are.
        counter: The number of the update that runs, as fused kernels take it.
        fused: A kernel that does the same as `rule`, in one pass over the memory; None
            if there is none.
    """

    def __init__(
        self,
        rule: UpdateRule,
        names: list[str],
        weights: list[Tensor],
        state: dict[str, list[Tensor]],
        numbers: Mapping[str, float],
        step: float,
    ) -> None:
        self.rule = rule
        self.names = names
        self.weights = weights
        self.state = state
        self.numbers = numbers
        self.step = step
        self.strides = [weight.stride() for weight in weights]
        self.counter = torch.full((), step)
        self.fused: FusedUpdate | None = None
        tensors = {slot: state[slot] for slot in state if slot != STEP}
        has_wide_state = all(map(_are_wide, tensors.values()))
        tensors[WEIGHT] = weights
        self._is_wide = has_wide_state and _are_wide(weights)
        self.suits_kernels = (
            has_wide_state
            and all(map(is_dense, weights))
            and all([t.stride() for t in of] == self.strides for of in tensors.values())
        )
        stored = tensors if self._is_wide else _Widened(tensors)
        self._operands = Operands(FOREACH, stored, numbers)

    def directions(self, gradients: list[Tensor]) -> list[Tensor]:
        """Turn float32 gradients into what gradient clipping applies to."""
        if self.fused is not None and self.fused.takes_gradients:
            return gradients
        directions: list[Tensor] = self.rule.direction(self._operands, gradients)
        return directions

    def update(self, directions: Sequence[Tensor]) -> None:
        """Update the weights, and the rest of the state."""
        self.step += 1.0
        if self.fused is not None:
            if STEP in self.state:
                self.counter.fill_(self.step)
            directions = same_layout(directions, self.strides)
            weights = self.weights if self._is_wide else widened(self.weights)
            self.fused.run(weights, directions)
            _write(weights, self.weights)
        else:
            self._operands.n = self.all_numbers(self.step)
            self.rule.update(self._operands, directions)

    def all_numbers(self, step: float) -> dict[str, float]:
        """Give all numbers that the formulas of the rule take.

        Args:
            step: The number of the update, from 1.
        """
        return {**self.numbers, **self.rule.factors(self.numbers, step)}

    def settle(self) -> None:
        """Write the number of updates into the state."""
        for tensor in self.state.get(STEP, ()):
            tensor.fill_(self.step)


class _Widened(Dict[str, List[Tensor]]):
    """Lists of tensors: read in float32, written in the type of each tensor."""

    def __init__(self, tensors: Mapping[str, list[Tensor]]) -> None:
        super().__init__(tensors)
        self._wide = {slot for slot, of in tensors.items() if _are_wide(of)}

    def __getitem__(self, slot: str) -> list[Tensor]:
        tensors = super().__getitem__(slot)
        return tensors if slot in self._wide else widened(tensors)

    def __setitem__(self, slot: str, values: Sequence[Tensor]) -> None:
        _write(values, super().__getitem__(slot))


def _write(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Write values to tensors of any type, unless they were computed in place.

    All that is rounded at random is so at once.
    """
    pairs = [(v, t) for v, t in zip(values, tensors) if v is not t]
    if rounds_at_random():
        halves = [(v, t) for v, t in pairs if t.dtype is torch.float16]
        if halves:
            flat = to_half(torch.cat([value.reshape(-1) for value, _ in halves]))
            parts = torch.split(flat, [value.numel() for value, _ in halves])
            for part, (_, tensor) in zip(parts, halves):
                tensor.copy_(part.view(tensor.shape))
        pairs = [(v, t) for v, t in pairs if t.dtype is not torch.float16]
    for value, tensor in pairs:
        tensor.copy_(value)


def widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Give tensors in float32, themselves if that is their type."""
    return [t if t.dtype is torch.float32 else t.float() for t in tensors]


def _are_wide(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.dtype is torch.float32 for tensor in tensors)
