# SPDX-License-Identifier: Apache-2.0
"""How a device runs one call of a compiled model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._device import DeviceWeights, GradientReduction
from ._layout import Inputs, Layout, Outputs
from ._program import Program

if TYPE_CHECKING:
    from ._update_rules import DeviceOptimizer
    from ._watch import Watch


def run_inference(
    program: Program,
    weights: DeviceWeights,
    layout: Layout,
    inputs: Inputs,
    outputs: Outputs,
) -> None:
    """One call of an inference model: every micro-batch once."""
    for step in range(layout.steps):
        for replica, rows in inputs.micro_batches(step):
            with torch.no_grad():  # each time: the program may leave it otherwise
                results = program.run(*weights.arguments(replica), *rows)
            outputs.add(step, replica, results)


def run_training(
    program: Program,
    weights: DeviceWeights,
    layout: Layout,
    inputs: Inputs,
    outputs: Outputs,
    optimizer: DeviceOptimizer,
    reduction: GradientReduction,
    watch: Watch | None = None,
) -> None:
    """One call of a training model: D weight updates.

    Each update accumulates the gradients of G micro-batches on each of R replicas,
    reduces them as asked, and steps the optimiser once (PopART, `popprograms.cpp`).
    """
    trained = weights.trained
    halves = {n: t for n, t in trained.items() if t.dtype == torch.float16}
    for tensor in trained.values():
        tensor.grad = None  # of a call that failed midway
    for iteration in range(layout.device_iterations):
        first = iteration * layout.gradient_accumulation
        steps = range(first, first + layout.gradient_accumulation)
        factor = optimizer.loss_scale_factor
        for step in steps:
            for replica, rows in inputs.micro_batches(step):
                with torch.enable_grad():
                    *results, loss = program.run(*weights.arguments(replica), *rows)
                reduction.backward(loss, factor)
                if halves:
                    reduction.accumulate(halves)
                outputs.add(step, replica, tuple(results))
                if watch is not None:
                    watch.saw_micro_batch(step, replica)
        optimizer.step(reduction.take_gradients(trained))
        if watch is not None:
            watch.saw_update(steps, optimizer)
