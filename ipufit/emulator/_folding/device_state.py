# SPDX-License-Identifier: Apache-2.0
"""Copies of a device's state around micro-batches, to go back and to compare."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ipufit.emulator._device.runner import Call
from ipufit.emulator._folding.check import difference


@dataclass(frozen=True)
class DeviceState:
    """A copy of everything that running micro-batches changes.

    Attributes:
        rng: torch's random state.
        weights: The weights that the program writes to, replica by replica.
        gradients: The `grad` of each trained weight.
        taken: The times at which micro-batches were taken.
    """

    rng: Tensor
    weights: list[Tensor]
    gradients: list[Tensor | None]
    taken: list[float]

    @classmethod
    def of(cls, call: Call) -> DeviceState:
        """Copy the present state."""
        return cls(
            torch.random.get_rng_state(),
            [weight.detach().clone() for weight in _written_weights(call)],
            [weight.grad for weight in call.weights.trained.values()],
            list(call.inputs.taken),
        )

    @torch.no_grad()
    def restore(self, call: Call) -> None:
        """Make this the present state."""
        torch.random.set_rng_state(self.rng)
        for weight, value in zip(_written_weights(call), self.weights):
            weight.copy_(value)
        for weight, gradient in zip(call.weights.trained.values(), self.gradients):
            weight.grad = gradient
        call.inputs.taken[:] = self.taken

    def difference(self, other: DeviceState, relative: float) -> str | None:
        """Describe a difference beyond rounding, except in the times."""
        if not torch.equal(self.rng, other.rng):
            return "other random numbers were drawn"
        pairs = list(zip(self.gradients, other.gradients))
        if any((one is None) != (two is None) for one, two in pairs):
            return "other weights have gradients"
        gradients = [(a, b) for a, b in pairs if a is not None and b is not None]
        for name, ones, others in (
            ("weights", self.weights, other.weights),
            ("gradients", [a for a, _ in gradients], [b for _, b in gradients]),
        ):
            reason = difference(ones, others, relative)
            if reason is not None:
                return f"{name}: {reason}"
        return None


def _written_weights(call: Call) -> list[Tensor]:
    return [
        weight
        for name in sorted(call.program.updated_weights)
        for weight in call.weights.of_replicas(name)
    ]
