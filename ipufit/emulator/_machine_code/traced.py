# SPDX-License-Identifier: Apache-2.0
"""Folds and updates as functions of tensors, to be translated to machine code.

Each takes all that it reads, and changes in place what a device changes: weights,
buffers, optimiser states. Numbers that may change from call to call come in as a
tensor too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Sequence

import torch
from torch import Tensor

from ipufit.emulator._layout.device_rng import DeviceRng
from ipufit.emulator._machine_code.update import Update
from ipufit.emulator._program.program import Program

if TYPE_CHECKING:
    from ipufit.emulator._folding.fold import Fold

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Observed:
    """Behaviour of a program that its graph doesn't show, seen when it ran once.

    Attributes:
        reached: The indices of the weights that get gradients.
        copied: The indices of the results that share memory with an argument.
    """

    reached: tuple[int, ...]
    copied: frozenset[int]

    @classmethod
    def of(cls, program: Program, arguments: Tensors, rows: Tensors) -> Observed:
        """Run a program once on the rows of a micro-batch.

        `arguments` are its weights; it may change them.
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
class TracedFold:
    """One micro-batch of a program, or several that are folded.

    Attributes:
        fold: Runs several micro-batches; None for one.
        trained: The indices of the weights that get gradients.
        copied: The indices of the results of a micro-batch that need a copy.
        sums_over: The number of replicas; 0 if the results aren't summed.
    """

    program: Program
    fold: Fold | None
    trained: tuple[int, ...]
    copied: frozenset[int]
    sums_over: int = 0

    def results(self, arguments: Tensors, rows: Tensors) -> list[Tensor]:
        """Compute the results of inference, micro-batch by micro-batch."""
        with torch.no_grad():
            results, _ = self._run(self._own(arguments), rows)
            return self._kept(results)

    def gradients(
        self, arguments: Tensors, rows: Tensors, scale: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the results of training, and the gradients of the scaled loss."""
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
        """Give the results of each micro-batch, and the loss, or all losses in one."""
        if self.fold is not None:
            folded, loss = self.fold.run(arguments, tuple(rows), [])
            return list(folded), loss
        results: Tensors = self.program.run(*arguments, *rows)
        if not self.program.has_loss:
            return [results], None
        return [results[:-1]], results[-1]

    def _own(self, arguments: Tensors) -> list[Tensor]:
        """Copy the arguments whose changes don't persist."""
        names = self.program.weight_names
        volatile = self.program.volatile_weights
        return [
            tensor.clone() if name in volatile else tensor
            for name, tensor in zip(names, arguments)
        ]

    def _kept(self, results: list[Tensors]) -> list[Tensor]:
        """Put the results in one list, summed if asked for."""
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
    """Add tensors in the order, and the type, in which a device adds them."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = (total + tensor).to(total.dtype)
    return total


@dataclass(frozen=True)
class TrainingFunctions:
    """The functions of a training program, whose arguments are single tensors.

    Attributes:
        update: The optimiser's arithmetic.
        num_weights: The number of weights that the program takes.
    """

    traced: TracedFold
    update: Update
    num_weights: int

    def whole(self, *tensors: Tensor) -> list[Tensor]:
        """Make an update, given weights, states, numbers, and rows."""
        arguments, state, values, rows = self._parts(tensors)
        results, gradients = self.traced.gradients(arguments, rows, values[0])
        trained = [arguments[index] for index in self.traced.trained]
        self.update.apply(trained, state, values, gradients)
        return results

    def part(self, *tensors: Tensor) -> list[Tensor]:
        """Add the gradients of a fold, given weights, sums, numbers, and rows."""
        arguments, sums, values, rows = self._parts(tensors)
        results, gradients = self.traced.gradients(arguments, rows, values[0])
        for total, gradient in zip(sums, gradients):
            total.add_(gradient)
        return results

    def last(self, *tensors: Tensor) -> list[Tensor]:
        """Make an update of sums, given trained weights, sums, states, and numbers."""
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
