# SPDX-License-Identifier: Apache-2.0
"""Run the micro-batches of a call one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Tuple

import torch
from torch import Tensor

from ipufit.emulator._device.gradients import Gradients
from ipufit.emulator._device.watch import Watch
from ipufit.emulator._device.weights import DeviceWeights
from ipufit.emulator._layout.layout import Inputs, Layout, Outputs
from ipufit.emulator._optimizers.device_optimizer import DeviceOptimizer
from ipufit.emulator._program.program import Program

Results = Tuple[Tensor, ...]
"""Tensors that a program returns for one micro-batch."""

Collect = Callable[[int, Results], None]
"""Takes the index of a micro-batch and its results."""


@dataclass(frozen=True)
class Call:
    """A call under way.

    Attributes:
        optimizer: Updates the weights; None for inference.
        gradients: Those of the update under way; None for inference.
        watch: Sees the gradients of each micro-batch, and the tensors that each update
            leaves; None if none of these is anchored.
    """

    program: Program
    weights: DeviceWeights
    layout: Layout
    inputs: Inputs
    outputs: Outputs
    optimizer: DeviceOptimizer | None = None
    gradients: Gradients | None = None
    watch: Watch | None = None

    def add_gradients(self, results: Results) -> Results:
        """Take the loss from results and add its gradients; none in inference."""
        if self.optimizer is None or self.gradients is None:
            return results
        *results_alone, loss = results
        self.gradients.backward(loss, self.optimizer.loss_scale_factor)
        return tuple(results_alone)

    def collect(self, index: int, results: Results) -> None:
        """Take the results of a micro-batch, in the order of indices."""
        step, replica = divmod(index, self.layout.replicas)
        self.outputs.add(step, replica, results)
        if self.watch is not None:
            self.watch.saw_micro_batch(step, replica)


class Runner:
    """Runs the micro-batches of calls one after the other."""

    def run(self, call: Call) -> None:
        """Run a call: each micro-batch once, and in training D updates.

        Each update accumulates the gradients of G micro-batches on each of R
        replicas, reduces them, and steps the optimizer once (PopART,
        `popprograms.cpp`).
        """
        optimizer, gradients, layout = call.optimizer, call.gradients, call.layout
        if optimizer is None or gradients is None:
            self.run_micro_batches(call, layout.micro_batches, call.collect)
            return
        size, replicas = layout.micro_batches_per_update, layout.replicas
        for first in layout.micro_batches[::size]:
            self.run_micro_batches(call, range(first, first + size), call.collect)
            optimizer.step(gradients.take())
            if call.watch is not None:
                steps = range(first // replicas, (first + size) // replicas)
                call.watch.saw_update(steps, optimizer)

    def run_micro_batches(self, call: Call, indices: range, collect: Collect) -> None:
        """Run the micro-batches of an update, or of an inference call.

        Args:
            call: Has the program, the weights, the rows, and takes gradients.
            indices: All replicas of some steps.
            collect: Called after each micro-batch.
        """
        replicas, run = call.layout.replicas, call.program.run
        is_training = call.optimizer is not None
        for index in indices:
            step, replica = divmod(index, replicas)
            rows = call.inputs.rows(step, replica)
            # Each time: the program may leave it otherwise.
            with torch.set_grad_enabled(is_training):
                results = run(*call.weights.arguments(replica), *rows)
            collect(index, call.add_gradients(results))
