# SPDX-License-Identifier: Apache-2.0
"""Run micro-batches one after the other."""

from __future__ import annotations

from time import perf_counter
from typing import Callable, Optional

import torch
from torch import Tensor
from torch._C import _set_grad_enabled

from ipufit.emulator._device.runner import Call, Results, Training

Collect = Callable[[int, Results], None]
"""Takes the index of a micro-batch and its results."""

Backward = Callable[[Tensor], None]
"""Computes gradients from one loss, or from several in a tensor."""

RunMicroBatches = Callable[[Call, range, Collect, Optional[Backward]], None]
"""Runs the micro-batches of a range; without `Backward`, those of inference."""


class LoopRunner:
    """Runs the micro-batches of a call one after the other."""

    def infer(self, call: Call) -> None:
        """Run each micro-batch of an inference call once."""
        loop_over(call, call.micro_batches, call.collect)

    def train(self, call: Call, training: Training) -> None:
        """Run the updates of a training call."""
        if call.micro_batches_per_update == 1 and training.watch is None:
            update_after_each(
                call, training, call.program.run, call.inputs.rows, call.outputs.add
            )
            return
        make_updates(call, training, loop_over)


def loop_over(
    call: Call, indices: range, collect: Collect, backward: Backward | None = None
) -> None:
    """Run micro-batches one after the other.

    Args:
        call: Has the program, the weights and the rows.
        indices: All replicas of some steps.
        collect: Called after each micro-batch.
        backward: Called with the loss of each; None for inference.
    """
    replicas, run = call.layout.replicas, call.program.run
    is_training = backward is not None
    for step in range(indices.start // replicas, indices.stop // replicas):
        for replica, rows in call.inputs.micro_batches(step):
            # Each time: the program may leave it otherwise.
            with torch.set_grad_enabled(is_training):
                results = run(*call.weights.arguments(replica), *rows)
            if backward is not None:
                *results, loss = results  # type: ignore[assignment]
                backward(loss)
            collect(step * replicas + replica, tuple(results))


def make_updates(call: Call, training: Training, run: RunMicroBatches) -> None:
    """Run a training call update by update.

    Args:
        call: Has the layout and the weights.
        training: Makes an update of the gradients of its micro-batches.
        run: Runs the micro-batches of one update.
    """
    size, replicas = call.micro_batches_per_update, call.layout.replicas
    watch = training.watch

    def collect(index: int, results: Results) -> None:
        call.collect(index, results)
        if watch is not None:
            watch.saw_micro_batch(*divmod(index, replicas))

    for first in range(0, len(call.micro_batches), size):
        run(call, range(first, first + size), collect, training.backward)
        training.optimizer.step(training.reduction.take_gradients())
        if watch is not None:
            steps = range(first // replicas, (first + size) // replicas)
            watch.saw_update(steps, training.optimizer)


def update_after_each(
    call: Call,
    training: Training,
    run: Callable[..., Results],
    rows: Callable[[int], Results],
    add: Callable[[int, int, Results], None],
) -> None:
    """Run a training call whose updates are of one micro-batch each.

    It does what `make_updates` does. Calls of small networks take a tenth less time.

    Args:
        call: Has the layout and the weights.
        training: Makes an update of the gradients of each micro-batch.
        run: Takes weights and rows; gives results, and the loss at last.
        rows: Gives the rows of a micro-batch.
        add: Takes the step, the replica and the results of each micro-batch.
    """
    weights, taken = call.weights, call.inputs.taken
    optimizer, reduction = training.optimizer, training.reduction
    with torch.enable_grad():
        for step in call.micro_batches:
            taken.append(perf_counter())
            *results, loss = run(*weights.arguments(0), *rows(step))
            training.backward(loss)
            add(step, 0, tuple(results))
            _set_grad_enabled(False)
            optimizer.step(reduction.take_gradients())
            _set_grad_enabled(True)
