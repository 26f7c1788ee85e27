# SPDX-License-Identifier: Apache-2.0
"""Run several micro-batches at once."""

from __future__ import annotations

from time import perf_counter
from typing import Sequence

import torch

from ipufit.emulator._device.loop_runner import (
    Backward,
    Collect,
    loop_over,
    make_updates,
)
from ipufit.emulator._device.runner import Call, Results, Runner, Training
from ipufit.emulator._folding.check import difference
from ipufit.emulator._folding.device_state import DeviceState
from ipufit.emulator._folding.folding import ERRORS, Folding


class FoldRunner:
    """Runs several micro-batches at once, where that gives what the loop gives.

    Folds of new sizes run beside the loop the first time. If they fail, or give
    something else, micro-batches run in the loop for good.

    Args:
        folding: Decides how many micro-batches run at once.
        one_by_one: Runs what isn't folded.
    """

    def __init__(self, folding: Folding, one_by_one: Runner) -> None:
        self.folding = folding
        self.one_by_one = one_by_one

    def infer(self, call: Call) -> None:
        """Run each micro-batch of an inference call once."""
        sizes = self.folding.sizes(call, len(call.micro_batches))
        if not sizes:
            self.one_by_one.infer(call)
        elif call.outputs.takes_whole and self.folding.returns_whole(sizes):
            self._infer_whole(call, sizes)
        else:
            self.run(call, call.micro_batches, call.collect)

    def train(self, call: Call, training: Training) -> None:
        """Run the updates of a training call."""
        if training.watch is None and self.folding.sizes(
            call, call.micro_batches_per_update
        ):
            make_updates(call, training, self.run)
        else:  # Only the loop has the gradients of each micro-batch.
            self.one_by_one.train(call, training)

    def run(
        self,
        call: Call,
        indices: range,
        collect: Collect,
        backward: Backward | None = None,
    ) -> None:
        """Run the micro-batches of an update, or of an inference call.

        Args:
            call: Has the program, the weights and the rows.
            indices: All replicas of some steps.
            collect: Gets the results of each, in their order.
            backward: Called with the losses of each fold in a tensor; None for
                inference.
        """
        sizes = self.folding.sizes(call, len(indices))
        if not sizes:
            loop_over(call, indices, collect, backward)
        elif self.folding.is_verified(sizes):
            self._run_folds(call, sizes, indices.start, collect, backward)
        else:
            self._verify(call, sizes, indices, collect, backward)

    def _infer_whole(self, call: Call, sizes: Sequence[int]) -> None:
        first = 0
        for size in sizes:
            started = perf_counter()
            fold = self.folding.fold_of(size)
            with torch.set_grad_enabled(False):
                rows = call.inputs.joined(first, size)
                call.outputs.add_whole(fold.run_whole(call.arguments(first), rows))
            call.inputs.note_fold(started, size)
            first += size

    def _run_folds(
        self,
        call: Call,
        sizes: Sequence[int],
        first: int,
        collect: Collect,
        backward: Backward | None,
    ) -> None:
        inputs = call.inputs
        for size in sizes:
            started = perf_counter()
            members = range(first, first + size)
            fold = self.folding.fold_of(size)
            apart = (
                [[*call.arguments(index), *inputs.rows(index)] for index in members]
                if fold.has_rest
                else []
            )
            with torch.set_grad_enabled(backward is not None):
                results, loss = fold.run(
                    call.arguments(first), inputs.joined(first, size), apart
                )
            if backward is not None and loss is not None:
                backward(loss)
            for index, of_one in zip(members, results):
                collect(index, of_one)
            inputs.note_fold(started, size)
            first += size

    def _verify(
        self,
        call: Call,
        sizes: Sequence[int],
        indices: range,
        collect: Collect,
        backward: Backward | None,
    ) -> None:
        """Run micro-batches both ways; go on with folds if both do the same."""
        before = DeviceState.of(call)
        looped: list[Results] = []
        folded: list[Results] = []
        loop_over(call, indices, lambda _, r: looped.append(_detached(r)), backward)
        after = DeviceState.of(call)
        before.restore(call)
        try:
            self._run_folds(
                call,
                sizes,
                indices.start,
                lambda _, results: folded.append(_detached(results)),
                backward,
            )
            relative = self.folding.tolerance
            reason = _difference(looped, folded, relative) or after.difference(
                DeviceState.of(call), relative
            )
        except ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is None:
            self.folding.accept(sizes)
        else:
            self.folding.give_up(reason)
            after.restore(call)
        for index, results in zip(indices, looped if reason else folded):
            collect(index, results)


def _detached(results: Results) -> Results:
    return tuple(tensor.detach() for tensor in results)


def _difference(
    looped: list[Results], folded: list[Results], relative: float
) -> str | None:
    """Describe how results differ, each output compared over all micro-batches."""
    if len(looped) != len(folded):
        return f"{len(folded)} results of {len(looped)} micro-batches"
    reason = difference(
        [torch.stack(column) for column in zip(*looped)],
        [torch.stack(column) for column in zip(*folded)],
        relative,
    )
    return f"results: {reason}" if reason is not None else None
