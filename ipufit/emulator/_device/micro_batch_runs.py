# SPDX-License-Identifier: Apache-2.0
"""Run micro-batches: one after the other, or several in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Callable, Tuple

import torch
from torch import Tensor

from ipufit.emulator._device.weights import DeviceWeights
from ipufit.emulator._folding.check import difference
from ipufit.emulator._folding.folding import ERRORS, Folding
from ipufit.emulator._layout.layout import Inputs, Layout
from ipufit.emulator._program.program import Program

if TYPE_CHECKING:
    from ipufit.emulator._device.watch import Watch
    from ipufit.emulator._machine_code.runner import (
        CompiledInference,
        CompiledTraining,
    )

Results = Tuple[Tensor, ...]

Collect = Callable[[int, Results], None]
"""Takes the results of a micro-batch, by its index (`step * R + replica`)."""

CollectWhole = Callable[[Results], None]
"""Takes the rows of several micro-batches, in their order."""


@dataclass(frozen=True)
class Device:
    """What a call runs, and on what.

    Attributes:
        program: Of one micro-batch.
        weights: The device's.
        layout: The factors of the call.
        inputs: Of the call.
        folding: Says which micro-batches run in one pass.
        code: Runs the program instead, if it is compiled to machine code.
    """

    program: Program
    weights: DeviceWeights
    layout: Layout
    inputs: Inputs
    folding: Folding
    code: CompiledInference | CompiledTraining | None = None

    def arguments(self, index: int) -> list[Tensor]:
        """The weights that a micro-batch takes."""
        return self.weights.arguments(index % self.layout.replicas)


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches that may run in one pass: those of an update, or of a call.

    Attributes:
        device: Runs them.
        indices: Theirs, all replicas of some steps.
        backward: Computes gradients from one loss, or several in a tensor; None for
            inference.
        watch: Wants to see the gradients of each.
    """

    device: Device
    indices: range
    backward: Callable[[Tensor], None] | None = None
    watch: Watch | None = None

    def run(self, collect: Collect, collect_whole: CollectWhole | None = None) -> None:
        """Run them all, in the way that was chosen for the program.

        Args:
            collect: Gets the results of each.
            collect_whole: Gets those of several that ran in one pass, uncut, if they
                needn't be cut; None if each must be seen.
        """
        sizes = self._sizes()
        if not sizes:
            self._alone(collect)
        elif self.device.folding.is_verified(sizes):
            self._together(sizes, collect, collect_whole)
        else:
            self._both_ways(sizes, collect)

    def _sizes(self) -> tuple[int, ...]:
        folding = self.device.folding
        if self.watch is not None or not folding.is_on:
            return ()
        known = folding.known_sizes(len(self.indices))
        if known is not None:
            return known
        first = self.indices[0]
        rows = self.device.inputs.rows(first)
        return folding.sizes(len(self.indices), [*self.device.arguments(first), *rows])

    def _alone(self, collect: Collect) -> None:
        device, replicas = self.device, self.device.layout.replicas
        program, backward = device.program, self.backward
        is_training = backward is not None
        for step in range(
            self.indices.start // replicas, self.indices.stop // replicas
        ):
            for replica, rows in device.inputs.micro_batches(step):
                # Each time: the program may leave it otherwise.
                with torch.set_grad_enabled(is_training):
                    results = program.run(*device.weights.arguments(replica), *rows)
                if backward is not None:
                    *results, loss = results  # type: ignore[assignment]
                    backward(loss)
                collect(step * replicas + replica, tuple(results))
                if self.watch is not None:
                    self.watch.saw_micro_batch(step, replica)

    def _together(
        self,
        sizes: tuple[int, ...],
        collect: Collect,
        collect_whole: CollectWhole | None = None,
    ) -> None:
        device = self.device
        first = self.indices.start
        for size in sizes:
            started = perf_counter()
            members = range(first, first + size)
            one_pass = device.folding.of_size(size)
            if one_pass.is_uncut and collect_whole is not None:
                with torch.set_grad_enabled(False):
                    joined = device.inputs.joined(first, size)
                    collect_whole(one_pass.run_uncut(device.arguments(first), joined))
                device.inputs.took_together(started, size)
                first += size
                continue
            with torch.set_grad_enabled(self.backward is not None):
                ran = one_pass.run(
                    [device.arguments(index) for index in members],
                    device.inputs.joined(first, size),
                    [device.inputs.rows(index) for index in members],
                )
            if self.backward is not None and ran.loss is not None:
                self.backward(ran.loss)
            for index, results in zip(members, ran.results):
                collect(index, results)
            device.inputs.took_together(started, size)
            first += size

    # The first time --------------------------------------------------------------

    def _both_ways(self, sizes: tuple[int, ...], collect: Collect) -> None:
        """Hold the passes against the loop; go on with them if both do the same."""
        before = self._state()
        alone: list[Results] = []
        together: list[Results] = []
        self._alone(lambda _, results: alone.append(_detached(results)))
        after = self._state()
        self._go_back_to(before)
        try:
            self._together(
                sizes, lambda _, results: together.append(_detached(results))
            )
            reason = _difference(alone, together) or after.difference(self._state())
        except ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is None:
            self.device.folding.was_verified(sizes)
        else:
            self.device.folding.give_up(reason)
            self._go_back_to(after)
        for index, results in zip(self.indices, alone if reason else together):
            collect(index, results)

    def _state(self) -> _State:
        device = self.device
        changing = [
            tensor
            for name in sorted(device.program.updated_weights)
            for tensor in device.weights.of_replicas(name)
        ]
        return _State(
            torch.random.get_rng_state(),
            [tensor.detach().clone() for tensor in changing],
            [tensor.grad for tensor in device.weights.trained.values()],
            list(device.inputs.taken),
            changing,
        )

    @torch.no_grad()
    def _go_back_to(self, state: _State) -> None:
        torch.random.set_rng_state(state.rng)
        for tensor, value in zip(state.weights, state.values):
            tensor.copy_(value)
        trained = self.device.weights.trained.values()
        for tensor, gradient in zip(trained, state.gradients):
            tensor.grad = gradient
        self.device.inputs.taken[:] = state.taken


@dataclass(frozen=True)
class _State:
    """What running micro-batches changes.

    Attributes:
        rng: torch's random state.
        values: Of the weights that the program writes to.
        gradients: Of the trained weights.
        taken: When micro-batches were taken.
        weights: Those that the program writes to.
    """

    rng: Tensor
    values: list[Tensor]
    gradients: list[Tensor | None]
    taken: list[float]
    weights: list[Tensor]

    def difference(self, other: _State) -> str | None:
        """What differs beyond rounding, except for time."""
        if not torch.equal(self.rng, other.rng):
            return "other random numbers were drawn"
        pairs = list(zip(self.gradients, other.gradients))
        if any((one is None) != (two is None) for one, two in pairs):
            return "other weights have gradients"
        gradients = [(a, b) for a, b in pairs if a is not None and b is not None]
        for what, ones, others in (
            ("weights", self.values, other.values),
            ("gradients", [a for a, _ in gradients], [b for _, b in gradients]),
        ):
            reason = difference(ones, others)
            if reason is not None:
                return f"{what}: {reason}"
        return None


def _detached(results: Results) -> Results:
    return tuple(tensor.detach() for tensor in results)


def _difference(alone: list[Results], together: list[Results]) -> str | None:
    """What differs in the results of the micro-batches, each tensor by its own size."""
    if len(alone) != len(together):
        return f"{len(together)} results of {len(alone)} micro-batches"
    reason = difference(
        [torch.stack(column) for column in zip(*alone)],
        [torch.stack(column) for column in zip(*together)],
    )
    return f"results: {reason}" if reason is not None else None
