# SPDX-License-Identifier: Apache-2.0
"""What a compiler is given: passes and updates as functions of tensors.

Each takes all that it reads, and changes in place what a device changes: weights,
buffers, optimiser states. Numbers that may change from call to call come in as a
tensor too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Iterator, Sequence

import torch
from torch import Tensor

from ipufit.emulator._device.weights import GradientReduction
from ipufit.emulator._layout.device_rng import DeviceRng
from ipufit.emulator._machine_code.rules import clipping_factor, formulas
from ipufit.emulator._program.program import Program
from ipufit.emulator._update.batch import STEP, Batch

if TYPE_CHECKING:
    from ipufit.emulator._folding.fold import Pass
    from ipufit.emulator._update.rules import DeviceOptimizer

Tensors = Sequence[Tensor]

_REDUCTION = ("scale", "divisor", "ratio")
"""What comes before the numbers of the optimiser."""


@dataclass(frozen=True)
class Observed:
    """What a program does that its graph doesn't say.

    Attributes:
        reached: The weights that get gradients, by index.
        copied: The results, by index, that have memory of an argument.
    """

    reached: tuple[int, ...]
    copied: frozenset[int]

    @classmethod
    def of(cls, program: Program, arguments: Tensors, rows: Tensors) -> Observed:
        """Run a program once.

        Args:
            program: What runs.
            arguments: Its weights. Those that it changes are changed.
            rows: A micro-batch.
        """
        memory = {_memory(tensor) for tensor in (*arguments, *rows)}
        with torch.set_grad_enabled(program.has_loss), DeviceRng(seed=0):
            results = program.run(*arguments, *rows)
        reached: tuple[int, ...] = ()
        if program.has_loss:
            *results, loss = results  # type: ignore[assignment]
            trained = [i for i, tensor in enumerate(arguments) if tensor.requires_grad]
            if trained and loss.requires_grad:
                gradients = torch.autograd.grad(
                    loss,
                    [arguments[index] for index in trained],
                    torch.zeros_like(loss),
                    allow_unused=True,
                )
                found = zip(trained, gradients)
                reached = tuple(i for i, gradient in found if gradient is not None)
        copied = (i for i, tensor in enumerate(results) if _memory(tensor) in memory)
        return cls(reached, frozenset(copied))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


@dataclass(frozen=True)
class TracedPass:
    """One micro-batch of a program, or several that are folded.

    Attributes:
        program: Of one micro-batch.
        folded: Runs several; None for one.
        trained: The weights that get gradients, by index.
        copied: The results of a micro-batch, by index, that need a copy.
        sums_over: Replicas; 0 if the results aren't summed.
    """

    program: Program
    folded: Pass | None
    trained: tuple[int, ...]
    copied: frozenset[int]
    sums_over: int = 0

    @property
    def count(self) -> int:
        """Micro-batches."""
        return 1 if self.folded is None else self.folded.count

    def results(self, arguments: Tensors, rows: Tensors) -> list[Tensor]:
        """What inference returns, micro-batch by micro-batch."""
        with torch.no_grad():
            columns, _ = self._run(self._own(arguments), rows)
            return self._kept(columns)

    def gradients(
        self, arguments: Tensors, rows: Tensors, scale: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What training returns, and the gradients of the loss times `scale`."""
        own = self._own(arguments)
        leaves = [own[index].detach().requires_grad_() for index in self.trained]
        for index, leaf in zip(self.trained, leaves):
            own[index] = leaf
        with torch.enable_grad():
            results, loss = self._run(own, rows)
            if loss is None:
                raise NotImplementedError("there is no loss")
            scales = scale.to(loss.dtype).expand(loss.shape)
            gradients = torch.autograd.grad(loss, leaves, scales)
        return self._kept(results), list(gradients)

    def _run(
        self, arguments: list[Tensor], rows: Tensors
    ) -> tuple[list[Tensors], Tensor | None]:
        """The results of each micro-batch, and the loss, or all losses in one."""
        if self.folded is not None:
            ran = self.folded.run([arguments] * self.count, tuple(rows), [])
            return list(ran.results), ran.loss
        results: Tensors = self.program.run(*arguments, *rows)
        if not self.program.has_loss:
            return [results], None
        return [results[:-1]], results[-1]

    def _own(self, arguments: Tensors) -> list[Tensor]:
        """The arguments; copies of those whose changes don't persist."""
        names = self.program.weight_names
        volatile = self.program.volatile_weights
        return [
            tensor.clone() if name in volatile else tensor
            for name, tensor in zip(names, arguments)
        ]

    def _kept(self, results: list[Tensors]) -> list[Tensor]:
        """The results in one list, summed if asked for."""
        kept = [
            [
                tensor.detach().clone() if index in self.copied else tensor.detach()
                for index, tensor in enumerate(of_one)
            ]
            for of_one in results
        ]
        if self.sums_over:
            kept = [
                [_sum(column) for column in zip(*kept[replica :: self.sums_over])]
                for replica in range(self.sums_over)
            ]
        return [tensor for of_one in kept for tensor in of_one]


def _sum(tensors: Tensors) -> Tensor:
    """In the order, and the type, in which a device adds them up."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = (total + tensor).to(total.dtype)
    return total


@dataclass(frozen=True)
class Update:
    """An optimiser's update of the weights.

    Attributes:
        batches: Weights that are updated together: what is asked of them are rules,
            names and slots of the state, not tensors.
        max_grad_norm: The largest norm of the gradients.
    """

    batches: tuple[Batch, ...]
    max_grad_norm: float

    def is_of(self, batches: Sequence[Batch]) -> bool:
        """Whether it is the update of these too."""
        shapes = [_shape(batch) for batch in batches]
        return [_shape(batch) for batch in self.batches] == shapes

    @property
    def num_values(self) -> int:
        """How many numbers it takes."""
        values = (formulas(b.rule).values(b, 1.0) for b in self.batches)
        return len(_REDUCTION) + sum(map(len, values))

    def table(
        self,
        optimizer: DeviceOptimizer,
        batches: Sequence[Batch],
        reduction: GradientReduction,
        updates: int,
    ) -> Tensor:
        """The numbers of some updates: a row for each.

        Args:
            optimizer: The device's.
            batches: Its own, of which `is_of` is true.
            reduction: Of the gradients.
            updates: How many will follow.
        """
        first = [reduction.scale, float(reduction.divisor), optimizer.gradient_ratio]
        rows = []
        for index in range(updates):
            row = list(first)
            for batch in batches:
                step = batch.step + 1.0 + index
                row += formulas(batch.rule).values(batch, step).values()
            rows.append(row)
        return torch.tensor(rows, dtype=torch.float32)

    def apply(
        self, weights: Tensors, states: Tensors, values: Tensor, gradients: Tensors
    ) -> None:
        """Update weights and states in place.

        Args:
            weights: Of all batches, one after the other.
            states: What `states(batches)` gives.
            values: A row of the table.
            gradients: The sums over the micro-batches; for each weight one.
        """
        numbers = iter(values.unbind(0))
        _, divisor, ratio = (next(numbers) for _ in _REDUCTION)
        remaining = iter(states)
        work = []
        for batch, start in self._starts():
            rule = formulas(batch.rule)
            names = rule.values(batch, 1.0)
            inputs = {name: next(numbers) for name in names}
            for index in range(start, start + len(batch.names)):
                before = {slot: next(remaining) for slot in _slots(batch)}
                after = dict(before)
                gradient = gradients[index] / divisor * ratio
                direction = rule.direction(weights[index], gradient, after, inputs)
                work.append((rule, weights[index], direction, before, after, inputs))
        factor = None
        if self.max_grad_norm != float("inf"):
            factor = clipping_factor([w[2] for w in work], self.max_grad_norm)
        for rule, weight, direction, before, after, inputs in work:
            clipped = direction if factor is None else direction * factor
            updated = rule.updated(weight, clipped, after, inputs)
            weight.copy_(updated)
            for slot, state in before.items():
                state.copy_(after[slot])

    def _starts(self) -> Iterator[tuple[Batch, int]]:
        start = 0
        for batch in self.batches:
            yield batch, start
            start += len(batch.names)


@dataclass(frozen=True)
class TrainingFunctions:
    """The functions of a training program, of flat tensors.

    Attributes:
        traced: A pass.
        update: The optimiser's.
        num_weights: How many weights the program takes.
    """

    traced: TracedPass
    update: Update
    num_weights: int

    def whole(self, *tensors: Tensor) -> list[Tensor]:
        """An update: of weights, states, numbers, and rows."""
        arguments, state, values, rows = self._parts(tensors)
        results, gradients = self.traced.gradients(arguments, rows, values[0])
        trained = [arguments[index] for index in self.traced.trained]
        self.update.apply(trained, state, values, gradients)
        return results

    def part(self, *tensors: Tensor) -> list[Tensor]:
        """A pass that adds gradients: of weights, sums, numbers, and rows."""
        arguments, sums, values, rows = self._parts(tensors)
        results, gradients = self.traced.gradients(arguments, rows, values[0])
        for total, gradient in zip(sums, gradients):
            total.add_(gradient)
        return results

    def last(self, *tensors: Tensor) -> list[Tensor]:
        """The rest of an update: of trained weights, sums, states, and numbers."""
        count = len(self.traced.trained)
        weights, sums = tensors[:count], tensors[count : 2 * count]
        *state, values = tensors[2 * count :]
        self.update.apply(weights, state, values, sums)
        for total in sums:
            total.zero_()
        return []

    def _parts(self, tensors: Tensors) -> tuple[Tensors, Tensors, Tensor, Tensors]:
        num_rows = self.traced.program.num_inputs
        end = len(tensors) - num_rows
        between = tensors[self.num_weights : end - 1]
        return tensors[: self.num_weights], between, tensors[end - 1], tensors[end:]


def states(batches: Sequence[Batch]) -> list[Tensor]:
    """The state tensors of batches, weight by weight."""
    return [
        batch.state[slot][index]
        for batch in batches
        for index in range(len(batch.names))
        for slot in _slots(batch)
    ]


def _slots(batch: Batch) -> list[str]:
    return [slot for slot in batch.state if slot != STEP]


def _shape(batch: Batch) -> tuple[object, ...]:
    return batch.rule, tuple(batch.names), tuple(batch.state)
