# SPDX-License-Identifier: Apache-2.0
"""Decide which programs are folded, and how many micro-batches run at once.

That depends on the program, its options and two environment variables alone, never on
time: two runs of a script give the same numbers bit by bit.
"""

from __future__ import annotations

from typing import Mapping, Sequence

import torch
from torch import Tensor

from ipufit.emulator._device.obstacles import obstacle
from ipufit.emulator._device.runner import Call
from ipufit.emulator._folding.check import RELATIVE, RELATIVE_OF_HALF
from ipufit.emulator._folding.fold import Fold
from ipufit.emulator._folding.split import Split
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._ground.switches import fold_bytes, folds
from ipufit.emulator._layout.layout import Layout
from ipufit.emulator._layout.replica_groups import ReplicaGroups
from ipufit.emulator._options.options import Options
from ipufit.emulator._program.program import Program

ERRORS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
"""The exceptions that torch raises for tensors that don't fit."""

_LARGEST_BLOCK = 31 * 2**20


def can_fold(
    program: Program,
    layout: Layout,
    options: Options,
    groups: Mapping[str, ReplicaGroups],
) -> bool:
    """Whether several micro-batches of a program may run at once.

    They may not if there is one only, if `IPUFIT_EMULATOR_FOLD` is 0, if replicas share
    rows, or if there is an `obstacle`. `groups` are the weights that differ between
    groups of replicas.
    """
    return (
        folds() is not False
        and layout.steps * layout.replicas > 1
        and layout.input_groups == layout.replicas
        and program.num_inputs > 0
        and obstacle(program, options, groups) is None
    )


class Folding:
    """Decides how many micro-batches of a program run at once.

    Attributes:
        is_on: Whether any do; once False, for good.
        failure: Why folds that were made aren't used any longer.
    """

    def __init__(self, program: Program) -> None:
        self.is_on = True
        self.failure: str | None = None
        self._is_forced = folds() is True
        self._max_bytes = fold_bytes(is_training=program.has_loss)
        self._program = program
        self._folds: dict[int, Fold] = {}
        self._verified: set[int] = set()
        self._split: Split | None = None
        self._sizes: dict[int, tuple[int, ...]] = {}

    def sizes(self, call: Call, count: int) -> tuple[int, ...]:
        """The number of micro-batches in each fold; nothing if they run in a loop.

        Args:
            call: Has arguments of the program to look at.
            count: Micro-batches that may be folded: those of an update, or of a call.
        """
        if not self.is_on or count < 2:
            return ()
        if count not in self._sizes:
            example = [*call.arguments(0), *call.inputs.rows(0)]
            self._sizes[count] = self._decide(count, example)
        return self._sizes[count]

    def _decide(self, count: int, arguments: Sequence[Tensor]) -> tuple[int, ...]:
        # One backward pass would add the gradients of micro-batches in float16.
        if any(t.dtype == torch.float16 and t.requires_grad for t in arguments):
            self.is_on = False
            return ()
        if self._split is None:
            try:
                self._split = Split(self._program, arguments)
            except ERRORS as error:
                self.give_up(f"{type(error).__name__}: {error}")
                return ()
        split = self._split
        if not split.folded or not (split.pays or self._is_forced):
            self.is_on = False
            return ()
        most = self._max_bytes // max(1, split.bytes_per_micro_batch)
        if most < 2:
            return ()
        num_folds = -(-count // min(count, most))
        size, longer = divmod(count, num_folds)
        _keep_freed_memory(split.bytes_per_micro_batch * (size + bool(longer)))
        return (size + 1,) * longer + (size,) * (num_folds - longer)

    @property
    def tolerance(self) -> float:
        """How far folds and loop may differ, as a share of the largest element."""
        rounds = self._split is not None and self._split.rounds
        return RELATIVE_OF_HALF if rounds else RELATIVE

    def fold_of(self, size: int) -> Fold:
        """The fold of so many micro-batches, a number that `sizes` gave."""
        if size not in self._folds:
            if self._split is None:
                raise AssertionError("`sizes` decides first")
            self._folds[size] = Fold(self._split, size)
        return self._folds[size]

    def is_verified(self, sizes: Sequence[int]) -> bool:
        """Whether folds of these sizes gave what the loop gives."""
        return self._verified.issuperset(sizes)

    def returns_whole(self, sizes: Sequence[int]) -> bool:
        """Whether these folds are verified, and their results needn't be cut."""
        return self.is_verified(sizes) and all(
            self.fold_of(size).is_uncut for size in sizes
        )

    def accept(self, sizes: Sequence[int]) -> None:
        """Use folds of these sizes from now on."""
        self._verified.update(sizes)

    def give_up(self, reason: str) -> None:
        """Run micro-batches in a loop from now on."""
        self.is_on = False
        self.failure = reason
        self._folds.clear()
        logger.warning(
            "Micro-batches run one after the other, not folded into one pass: %s",
            reason,
        )


def _keep_freed_memory(num_bytes: int) -> None:
    """Have the C library keep the memory that one fold frees for the next.

    glibc gives what is free at the end of the heap back to the system, and clears it
    again for each fold: a quarter of its time, measured. Whenever a block is freed that
    is larger than all before, up to 32 MiB, it keeps twice as much from then on
    (mallopt(3), `M_MMAP_THRESHOLD`). So one is, without being written to.
    """
    torch.empty(min(num_bytes, _LARGEST_BLOCK), dtype=torch.uint8)
