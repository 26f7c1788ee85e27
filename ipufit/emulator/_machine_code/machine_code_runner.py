# SPDX-License-Identifier: Apache-2.0
"""Run a program as machine code: a fold, or a whole update, in one function each."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar, ContextManager, Mapping, Sequence

import torch
from torch import Tensor

from ipufit.emulator._device.runner import Call, Mark, Runner, Training
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._machine_code.machine_functions import MachineFunction
from ipufit.emulator._machine_code.update import Update, states
from ipufit.emulator._update.fused_kernels import same_layout

_DECLINED = (
    "This call isn't run by machine code: the memory layout of weights has changed, or "
    "the state that was loaded into the optimizer differs between weights of one group."
)


@dataclass(frozen=True)
class FoldFunctions:
    """The micro-batches of an inference call, or of an update, as machine code.

    Attributes:
        functions: By the number of micro-batches that they run. They take the weights,
            tensors of the caller's, and the rows.
        sizes: Micro-batches in each fold; nothing if they run one by one.
        num_rows: The number of tensors of rows.
        sums_over: The number of replicas, if a fold adds up its results; else 0.
    """

    functions: Mapping[int, MachineFunction]
    sizes: tuple[int, ...]
    num_rows: int
    sums_over: int

    def take(self, call: Call, between: Sequence[Tensor]) -> bool:
        """Whether the weights, and what comes after them, are laid out as expected."""
        return all(
            function.takes([*call.weights.arguments(replica), *between])
            for function in self.functions.values()
            for replica in range(call.layout.replicas)
        )

    def run(self, call: Call, indices: range, between: Sequence[Tensor]) -> None:
        """Run micro-batches.

        Args:
            call: Has the weights, the rows, and the outputs that take the results.
            indices: All replicas of some steps.
            between: Arguments of the functions between weights and rows.
        """
        if self.sizes:
            self._run_folds(call, indices.start, between)
        else:
            self._run_one_by_one(call, indices, between)

    def _run_one_by_one(
        self, call: Call, indices: range, between: Sequence[Tensor]
    ) -> None:
        function, replicas = self.functions[1], call.layout.replicas
        strides = function.last_strides(self.num_rows)
        for step in range(indices.start // replicas, indices.stop // replicas):
            for replica, rows in call.inputs.micro_batches(step):
                weights = call.weights.arguments(replica)
                results = function.run(
                    [*weights, *between, *same_layout(rows, strides)]
                )
                call.outputs.add(step, replica, tuple(results))

    def _run_folds(self, call: Call, first: int, between: Sequence[Tensor]) -> None:
        weights, inputs = call.weights.arguments(0), call.inputs
        for size in self.sizes:
            started = perf_counter()
            function = self.functions[size]
            rows = same_layout(
                inputs.joined(first, size), function.last_strides(self.num_rows)
            )
            results = function.run([*weights, *between, *rows])
            parts = self.sums_over or size
            each = len(results) // parts
            for part in range(parts):
                own = results[part * each : (part + 1) * each]
                call.collect(first + part, tuple(own))
            inputs.note_fold(started, size)
            first += size


@dataclass(frozen=True)
class UpdateFunctions:
    """The end of an update as machine code, or the optimiser's part in a whole one.

    If one fold holds all micro-batches of an update, the whole update is one function:
    of the weights, the optimiser's states, its numbers, and the rows. Otherwise the
    folds add gradients to sums, which they take in the place of the states; and a last
    function, of the trained weights, the sums, the states and the numbers, updates and
    leaves the sums at zero. So it is for several processes too: between the folds and
    the last function the sums are added up over them.

    Attributes:
        names: The weights that get gradients, as the optimiser orders them.
        trained: Their indices among all weights, in the order of `update`.
        update: The optimiser's arithmetic.
        last: The last function; None if the whole update is one function.
    """

    names: tuple[str, ...]
    trained: tuple[int, ...]
    update: Update
    last: MachineFunction | None


class MachineCodeRunner:
    """Runs a program as machine code.

    Args:
        folds: Run the micro-batches.
        otherwise: Runs the calls that don't suit the machine code: weights are laid
            out in another way now, or a state was loaded that parts weights of one
            group.
        updates: Make the updates of a training program.
    """

    first_part: ClassVar[tuple[str, str]] = ("machine code", "device")

    def __init__(
        self,
        folds: FoldFunctions,
        otherwise: Runner,
        updates: UpdateFunctions | None = None,
    ) -> None:
        self.folds = folds
        self.otherwise = otherwise
        self.updates = updates

    def marked(self, call: Call, mark: Mark) -> ContextManager[None]:
        """Mark the calls that don't suit the machine code, which is one piece."""
        return self.otherwise.marked(call, mark)

    def infer(self, call: Call) -> None:
        """Run each micro-batch of an inference call once."""
        if self.folds.take(call, ()):
            self.folds.run(call, call.micro_batches, ())
        else:
            logger.warning(_DECLINED)
            self.otherwise.infer(call)

    def train(self, call: Call, training: Training) -> None:
        """Run the updates of a training call."""
        if self.updates is None or not self._train(call, training, self.updates):
            logger.warning(_DECLINED)
            self.otherwise.train(call, training)

    def _train(self, call: Call, training: Training, updates: UpdateFunctions) -> bool:
        """Run a training call if it suits the machine code; say whether it did."""
        optimizer = training.optimizer
        groups = optimizer.groups(updates.names)
        if not updates.update.is_of(groups):
            return False
        state = states(groups)
        weights = call.weights.arguments(0)
        trained = [weights[index] for index in updates.trained]
        sums = [] if updates.last is None else list(map(torch.zeros_like, trained))
        given = state if updates.last is None else sums
        if not self.folds.take(call, given):
            return False
        table = updates.update.table(
            optimizer, groups, training.reduction, call.layout.device_iterations
        )
        size = call.micro_batches_per_update
        over_processes = training.reduction.sums
        by_name: dict[str, Tensor] = {}
        if over_processes is not None:
            names = call.program.weight_names
            by_name = {names[i]: total for i, total in zip(updates.trained, sums)}
        for index, values in enumerate(table.unbind(0)):
            members = range(index * size, (index + 1) * size)
            self.folds.run(call, members, [*given, values])
            if updates.last is not None:
                if over_processes is not None:
                    over_processes.add_up_in_place(by_name)
                updates.last.run([*trained, *sums, *state, values])
            for group in groups:
                group.step += 1.0
        return True
