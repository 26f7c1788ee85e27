# SPDX-License-Identifier: Apache-2.0
"""The protocol of the ways to run a program, and what each call gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Protocol,
    Tuple,
)

from torch import Tensor

if TYPE_CHECKING:
    from ipufit.emulator._device.gradients import GradientReduction
    from ipufit.emulator._device.watch import Watch
    from ipufit.emulator._device.weights import DeviceWeights
    from ipufit.emulator._layout.layout import Inputs, Layout, Outputs
    from ipufit.emulator._optimizers.device_optimizer import DeviceOptimizer
    from ipufit.emulator._program.program import Program

Results = Tuple[Tensor, ...]
"""Tensors that a program returns for one micro-batch."""


@dataclass(frozen=True)
class Call:
    """Everything one executor call needs: the program, its weights and inputs."""

    program: Program
    weights: DeviceWeights
    layout: Layout
    inputs: Inputs
    outputs: Outputs

    @property
    def micro_batches(self) -> range:
        """The indices of all micro-batches, `step * R + replica`."""
        return range(self.layout.steps * self.layout.replicas)

    @property
    def micro_batches_per_update(self) -> int:
        """The number of micro-batches of one update, `G * R`."""
        return self.layout.gradient_accumulation * self.layout.replicas

    def arguments(self, index: int) -> list[Tensor]:
        """The weights that a micro-batch takes."""
        return self.weights.arguments(index % self.layout.replicas)

    def collect(self, index: int, results: Results) -> None:
        """Give the results of a micro-batch to the outputs, in the order of indices."""
        self.outputs.add(*divmod(index, self.layout.replicas), results)


@dataclass(frozen=True)
class Training:
    """Everything a training call needs besides: the optimiser and the reduction.

    Attributes:
        watch: Sees the gradients of each micro-batch and what each update leaves;
            None if none of these tensors is anchored.
    """

    optimizer: DeviceOptimizer
    reduction: GradientReduction
    watch: Watch | None = None

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one loss, or of several in a tensor."""
        self.reduction.backward(loss, self.optimizer.loss_scale_factor)


class Runner(Protocol):
    """A way to run a program: looped or folded.

    A runner that can't run a call hands it on to the runner that it was made with.
    All give the same numbers but for rounding.
    """

    def infer(self, call: Call) -> None:
        """Run each micro-batch of an inference call once."""

    def train(self, call: Call, training: Training) -> None:
        """Run a training call: D updates.

        Each update accumulates the gradients of G micro-batches on each of R
        replicas, reduces them, and steps the optimiser once (PopART,
        `popprograms.cpp`).
        """
