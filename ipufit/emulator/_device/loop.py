# SPDX-License-Identifier: Apache-2.0
"""How a device runs one call of a compiled model."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch._C import _set_grad_enabled

from ipufit.emulator._device.micro_batch_runs import Device, MicroBatches, Results
from ipufit.emulator._device.weights import GradientReduction
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._layout.layout import Outputs

if TYPE_CHECKING:
    from ipufit.emulator._device.watch import Watch
    from ipufit.emulator._machine_code.runner import (
        CompiledInference,
        CompiledTraining,
    )
    from ipufit.emulator._update.device_optimizer import DeviceOptimizer

_NOT_BY_MACHINE_CODE = (
    "This call isn't run by machine code: the memory layout of weights has changed, or "
    "the state that was loaded into the optimizer differs between weights of one group."
)


@dataclass(frozen=True)
class _Collector:
    """Gives the results of micro-batches to the outputs of a call."""

    outputs: Outputs
    replicas: int

    def __call__(self, index: int, results: Results) -> None:
        self.outputs.add(*divmod(index, self.replicas), results)


@dataclass(frozen=True)
class _Backward:
    """Computes the gradients of one update, of one loss or several in a tensor."""

    reduction: GradientReduction
    factor: float
    halves: dict[str, Tensor]

    def __call__(self, loss: Tensor) -> None:
        self.reduction.backward(loss, self.factor)
        if self.halves:
            self.reduction.accumulate(self.halves)


def run_inference(device: Device, outputs: Outputs) -> None:
    """One call of an inference model: every micro-batch once."""
    if device.code is not None:
        if cast("CompiledInference", device.code).run(device, outputs):
            return
        logger.warning(_NOT_BY_MACHINE_CODE)
    layout = device.layout
    indices = range(layout.steps * layout.replicas)
    MicroBatches(device, indices).run(
        _Collector(outputs, layout.replicas),
        outputs.add_whole if outputs.takes_whole else None,
    )


def run_training(
    device: Device,
    outputs: Outputs,
    optimizer: DeviceOptimizer,
    reduction: GradientReduction,
    watch: Watch | None = None,
) -> None:
    """One call of a training model: D weight updates.

    Each update accumulates the gradients of G micro-batches on each of R replicas,
    reduces them as asked, and steps the optimiser once (PopART, `popprograms.cpp`).
    """
    if device.code is not None:
        code = cast("CompiledTraining", device.code)
        if code.run(device, outputs, optimizer, reduction):
            return
        logger.warning(_NOT_BY_MACHINE_CODE)
    layout, trained = device.layout, device.weights.trained
    is_single = layout.gradient_accumulation * layout.replicas == 1
    if is_single and watch is None:
        _run_updates(device, outputs, optimizer, reduction)
        return
    halves = {n: t for n, t in trained.items() if t.dtype == torch.float16}
    collect = _Collector(outputs, layout.replicas)
    per_update = layout.gradient_accumulation * layout.replicas
    for tensor in trained.values():
        tensor.grad = None  # of a call that failed midway
    for iteration in range(layout.device_iterations):
        indices = range(iteration * per_update, (iteration + 1) * per_update)
        backward = _Backward(reduction, optimizer.loss_scale_factor, halves)
        MicroBatches(device, indices, backward, watch).run(collect)
        optimizer.step(reduction.take_gradients(trained))
        if watch is not None:
            first = iteration * layout.gradient_accumulation
            watch.saw_update(
                range(first, first + layout.gradient_accumulation), optimizer
            )


def _run_updates(
    device: Device,
    outputs: Outputs,
    optimizer: DeviceOptimizer,
    reduction: GradientReduction,
) -> None:
    """The same where an update is one micro-batch: the shortest way through it."""
    run, weights, trained = device.program.run, device.weights, device.weights.trained
    halves = {n: t for n, t in trained.items() if t.dtype == torch.float16}
    for tensor in trained.values():
        tensor.grad = None  # of a call that failed midway
    inputs = device.inputs
    with torch.enable_grad():
        for step in range(device.layout.device_iterations):
            inputs.taken.append(perf_counter())
            *results, loss = run(*weights.arguments(0), *inputs.rows(step))
            reduction.backward(loss, optimizer.loss_scale_factor)
            if halves:
                reduction.accumulate(halves)
            outputs.add(step, 0, tuple(results))
            _set_grad_enabled(False)
            optimizer.step_in_no_grad(reduction.take_gradients(trained))
            _set_grad_enabled(True)
