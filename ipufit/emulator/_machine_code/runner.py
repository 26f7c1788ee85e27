# SPDX-License-Identifier: Apache-2.0
"""A program as machine code: passes, or whole updates, in one call each."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Mapping, Sequence

import torch
from torch import Tensor

from ipufit.emulator._device.micro_batch_runs import Device, MicroBatches
from ipufit.emulator._device.weights import GradientReduction
from ipufit.emulator._layout.device_rng import DeviceRng
from ipufit.emulator._layout.layout import Outputs
from ipufit.emulator._machine_code.machine_functions import Compiled, compile_function
from ipufit.emulator._machine_code.traced import (
    Observed,
    TracedPass,
    TrainingFunctions,
)
from ipufit.emulator._machine_code.update import Update, states
from ipufit.emulator._update.fused_kernels import same_layout

if TYPE_CHECKING:
    from ipufit.emulator._update.device_optimizer import DeviceOptimizer


@dataclass(frozen=True)
class Passes:
    """The micro-batches of a call, or of an update, as compiled functions.

    Attributes:
        functions: By how many micro-batches they run. They take the weights, tensors
            of the caller's, and the rows.
        sizes: Micro-batches in each pass; nothing if they run one by one.
        num_rows: How many tensors the rows are.
        sums_over: Replicas, if a pass adds up its results; else 0.
    """

    functions: Mapping[int, Compiled]
    sizes: tuple[int, ...]
    num_rows: int
    sums_over: int

    def take(self, device: Device, between: Sequence[Tensor]) -> bool:
        """Whether weights, and what comes after them, are what was compiled for."""
        return all(
            function.takes([*device.weights.arguments(replica), *between])
            for function in self.functions.values()
            for replica in range(device.layout.replicas)
        )

    def run(
        self,
        device: Device,
        indices: range,
        between: Sequence[Tensor],
        outputs: Outputs,
    ) -> None:
        """Run micro-batches.

        Args:
            device: Has the weights and the inputs.
            indices: Of the micro-batches: all replicas of some steps.
            between: What the functions take between weights and rows.
            outputs: Take the results.
        """
        if self.sizes:
            self._together(device, indices.start, between, outputs)
        else:
            self._one_by_one(device, indices, between, outputs)

    def _one_by_one(
        self,
        device: Device,
        indices: range,
        between: Sequence[Tensor],
        outputs: Outputs,
    ) -> None:
        function, replicas = self.functions[1], device.layout.replicas
        strides = function.last_strides(self.num_rows)
        for step in range(indices.start // replicas, indices.stop // replicas):
            for replica, rows in device.inputs.micro_batches(step):
                arguments = device.weights.arguments(replica)
                results = function.run(
                    [*arguments, *between, *same_layout(rows, strides)]
                )
                outputs.add(step, replica, tuple(results))

    def _together(
        self, device: Device, first: int, between: Sequence[Tensor], outputs: Outputs
    ) -> None:
        arguments, inputs = device.weights.arguments(0), device.inputs
        for size in self.sizes:
            started = perf_counter()
            function = self.functions[size]
            rows = same_layout(
                inputs.joined(first, size), function.last_strides(self.num_rows)
            )
            results = function.run([*arguments, *between, *rows])
            parts = self.sums_over or size
            each = len(results) // parts
            for part in range(parts):
                place = divmod(first + part, device.layout.replicas)
                outputs.add(*place, tuple(results[part * each : (part + 1) * each]))
            inputs.took_together(started, size)
            first += size


@dataclass(frozen=True)
class CompiledInference:
    """An inference program.

    Attributes:
        passes: Of a call.
    """

    passes: Passes

    @classmethod
    def of(
        cls, device: Device, outputs: Outputs, folder: str | None
    ) -> CompiledInference:
        """Compile a program.

        Args:
            device: Like the one that it will run on, with inputs of one call. Its
                weights may be changed.
            outputs: Of a call.
            folder: Where compiled functions are kept.
        """
        plan = _Plan.of(device, outputs, None)
        arguments = plan.arguments
        count = len(arguments)

        def compiled(size: int) -> Compiled:
            traced = plan.traced(size, ())

            def infer(*tensors: Tensor) -> list[Tensor]:
                return traced.results(tensors[:count], tensors[count:])

            example = [*arguments, *plan.rows(size)]
            return compile_function(
                f"inference of {_micro_batches(size)}",
                infer,
                example,
                folder,
                is_differentiated=False,
                is_random=device.program.is_random,
            )

        return cls(plan.passes({size: compiled(size) for size in plan.counts}))

    def run(self, device: Device, outputs: Outputs) -> bool:
        """One call.

        Returns:
            Whether there was one: not if weights are laid out in another way now.
        """
        if not self.passes.take(device, ()):
            return False
        total = device.layout.steps * device.layout.replicas
        self.passes.run(device, range(total), (), outputs)
        return True


@dataclass(frozen=True)
class CompiledTraining:
    """A training program.

    If all micro-batches of an update are one pass, the whole update is one function: of
    the weights, the optimiser's states, its numbers, and the rows. Otherwise the passes
    add gradients to sums, which they take in the place of the states; and a last
    function, of the trained weights, the sums, the states and the numbers, updates and
    leaves the sums at zero.

    Attributes:
        names: The weights that get gradients, as the optimiser orders them.
        trained: Where they are among all weights, in the order of `update`.
        update: The optimiser's.
        passes: Of an update.
        last: The last function, if there is one.
    """

    names: tuple[str, ...]
    trained: tuple[int, ...]
    update: Update
    passes: Passes
    last: Compiled | None

    @classmethod
    def of(
        cls,
        device: Device,
        outputs: Outputs,
        optimizer: DeviceOptimizer,
        reduction: GradientReduction,
        folder: str | None,
    ) -> CompiledTraining:
        """Compile a program.

        Args:
            device: Like the one that it will run on, with inputs of one call. Its
                weights may be changed.
            outputs: Of a call.
            optimizer: Of these weights.
            reduction: Of their gradients.
            folder: Where compiled functions are kept.

        Raises:
            NotImplementedError: Nothing is trained.
        """
        plan = _Plan.of(device, outputs, reduction)
        weight_names = device.program.weight_names
        reached = {weight_names[index] for index in plan.observed.reached}
        names = tuple(name for name in optimizer.names if name in reached)
        if not names:
            raise NotImplementedError("nothing is trained")
        update = Update(tuple(optimizer.groups(names)), optimizer.max_grad_norm)
        trained = tuple(
            weight_names.index(name) for group in update.groups for name in group.names
        )
        weights = [plan.arguments[index] for index in trained]
        sums = [torch.zeros_like(weight) for weight in weights]
        # No zeros, and no two alike: compiled functions are held against these.
        state = [torch.full_like(tensor, 0.01) for tensor in states(update.groups)]
        values = torch.linspace(0.5, 1.5, update.num_values)
        is_whole = len(plan.sizes or plan.indices) == 1

        def compiled(size: int) -> Compiled:
            traced = TrainingFunctions(
                plan.traced(size, trained), update, len(plan.arguments)
            )
            between = state if is_whole else sums
            what = "an update" if is_whole else "training"
            return compile_function(
                f"{what} of {_micro_batches(size)}",
                traced.whole if is_whole else traced.part,
                [*plan.arguments, *between, values, *plan.rows(size)],
                folder,
                is_differentiated=True,
                is_random=device.program.is_random,
            )

        passes = plan.passes({size: compiled(size) for size in plan.counts})
        if is_whole:
            return cls(names, trained, update, passes, None)
        last = compile_function(
            "the optimizer",
            TrainingFunctions(plan.traced(1, trained), update, 0).last,
            [*weights, *sums, *state, values],
            folder,
            is_differentiated=False,
            is_random=False,
        )
        return cls(names, trained, update, passes, last)

    def run(
        self,
        device: Device,
        outputs: Outputs,
        optimizer: DeviceOptimizer,
        reduction: GradientReduction,
    ) -> bool:
        """One call.

        Returns:
            Whether there was one: not if weights are laid out in another way now, or a
            state was loaded that parts weights of one group.
        """
        groups = optimizer.groups(self.names)
        if not self.update.is_of(groups):
            return False
        layout = device.layout
        updates = layout.device_iterations
        table = self.update.table(optimizer, groups, reduction, updates)
        state = states(groups)
        arguments = device.weights.arguments(0)
        trained = [arguments[index] for index in self.trained]
        sums = [] if self.last is None else list(map(torch.zeros_like, trained))
        if not self.passes.take(device, state if self.last is None else sums):
            return False
        per_update = layout.gradient_accumulation * layout.replicas
        for update, values in enumerate(table.unbind(0)):
            indices = range(update * per_update, (update + 1) * per_update)
            between = [*(state if self.last is None else sums), values]
            self.passes.run(device, indices, between, outputs)
            if self.last is not None:
                self.last.run([*trained, *sums, *state, values])
            for group in groups:
                group.step += 1.0
        return True


@dataclass(frozen=True)
class _Plan:
    """How the micro-batches of a call, or an update, are to be run.

    Attributes:
        device: With inputs of one call.
        outputs: Of a call.
        observed: What the program does.
        indices: Of the micro-batches.
        sizes: Of the passes that they run in; nothing if they run one by one.
        arguments: The weights, without a history of their own.
    """

    device: Device
    outputs: Outputs
    observed: Observed
    indices: range
    sizes: tuple[int, ...]
    arguments: list[Tensor]

    @classmethod
    def of(
        cls, device: Device, outputs: Outputs, reduction: GradientReduction | None
    ) -> _Plan:
        layout, folding = device.layout, device.folding
        steps = layout.steps if reduction is None else layout.gradient_accumulation
        indices = range(steps * layout.replicas)
        arguments = device.weights.arguments(0)
        rows = device.inputs.rows(0)
        observed = Observed.of(device.program, arguments, rows)
        sizes: tuple[int, ...] = ()
        # What differs between replicas isn't folded.
        if folding.is_on and not device.program.updated_weights:
            backward = None if reduction is None else reduction.backward
            with DeviceRng(seed=0):
                MicroBatches(device, indices, backward).run(_ignore)
            sizes = folding.sizes(len(indices), [*arguments, *rows])
            if any(not folding.of_size(size).is_whole for size in set(sizes)):
                sizes = ()
        return cls(
            device, outputs, observed, indices, sizes, [t.detach() for t in arguments]
        )

    @property
    def counts(self) -> list[int]:
        """Micro-batches that functions are needed for."""
        return sorted(set(self.sizes)) or [1]

    @property
    def sums_over(self) -> int:
        """Replicas, if a pass can add up its results, else 0."""
        replicas = self.device.layout.replicas
        can_sum = self.sizes and all(size % replicas == 0 for size in self.sizes)
        return replicas if can_sum and self.outputs.are_sums else 0

    def rows(self, size: int) -> list[Tensor]:
        """Rows like those of a pass."""
        inputs = self.device.inputs
        return list(inputs.joined(0, size) if self.sizes else inputs.rows(0))

    def traced(self, size: int, trained: tuple[int, ...]) -> TracedPass:
        """A pass, to be traced."""
        folded = self.device.folding.of_size(size) if self.sizes else None
        copied = self.observed.copied
        return TracedPass(self.device.program, folded, trained, copied, self.sums_over)

    def passes(self, functions: Mapping[int, Compiled]) -> Passes:
        """The passes, with what was compiled for each size."""
        num_rows = len(self.device.inputs.rows(0))
        return Passes(functions, self.sizes, num_rows, self.sums_over)


def _micro_batches(count: int) -> str:
    return f"{count} micro-batch" if count == 1 else f"{count} micro-batches"


def _ignore(index: int, results: object) -> None:
    pass
