# SPDX-License-Identifier: Apache-2.0
"""Several micro-batches in one pass, where that is the same maths.

Whether a program is folded depends on it, its options and two environment variables
alone, never on time: two runs of a script give the same numbers bit by bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping, Sequence

import torch
from torch import Tensor

from ipufit.emulator._folding.fold import Pass
from ipufit.emulator._folding.split import Split
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._ground.switches import fold_bytes, folds
from ipufit.emulator._layout.layout import Layout
from ipufit.emulator._ops.control_flow import run_branch, run_loop
from ipufit.emulator._ops.custom_ops import run_custom_op
from ipufit.emulator._ops.floating_point import stops_at_exceptions
from ipufit.emulator._ops.host_calls import call_on_host
from ipufit.emulator._ops.tensor_log import print_tensor
from ipufit.emulator._program.program import Program
from ipufit.emulator._tracing.half import original

if TYPE_CHECKING:
    from ipufit.emulator._layout.replica_groups import ReplicaGroups
    from ipufit.emulator._options.options import Options

_SEEN_OUTSIDE = (call_on_host, print_tensor, run_branch, run_custom_op, run_loop)
"""Calls that must be made as often as a device makes them, in the same order."""

ERRORS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
"""What torch raises for tensors that don't fit."""


_LARGEST_BLOCK = 31 * 2**20


class Folding:
    """Decides which micro-batches of a call run in one pass.

    Args:
        program: What runs.
        layout: The factors of a call.
        is_possible: Whether the options allow it.

    Attributes:
        is_on: Whether passes may be made at all; once False, for good.
        failure: Why passes that were made are made no longer.
    """

    def __init__(self, program: Program, layout: Layout, *, is_possible: bool) -> None:
        self.failure: str | None = None
        wanted = folds()
        self._is_forced = wanted is True
        self._max_bytes = fold_bytes(is_training=program.has_loss)
        self._program = program
        self._passes: dict[int, Pass] = {}
        self._verified: set[int] = set()
        self._split: Split | None = None
        self._sizes: dict[int, tuple[int, ...]] = {}
        self.is_on = (
            is_possible
            and wanted is not False
            and layout.steps * layout.replicas > 1
            and layout.input_groups == layout.replicas
            and program.num_inputs > 0
            and not program.written_inputs
            and not any(_is_seen_outside(n.target) for n in program.graph.graph.nodes)
        )

    @classmethod
    def of(
        cls,
        program: Program,
        layout: Layout,
        options: Options,
        groups: Mapping[str, ReplicaGroups],
    ) -> Folding:
        """Read off the options whether passes can be made.

        They can't if replicas have weights of their own, if rounding is random, or if
        every value is checked.
        """
        is_random = bool(options._Popart.options.get("enableStochasticRounding"))
        is_possible = not (groups or is_random or stops_at_exceptions(options))
        return cls(program, layout, is_possible=is_possible)

    def known_sizes(self, count: int) -> tuple[int, ...] | None:
        """What `sizes` gave for so many micro-batches; None if nobody has asked."""
        return () if count < 2 else self._sizes.get(count)

    def sizes(self, count: int, arguments: Sequence[Tensor]) -> tuple[int, ...]:
        """How many micro-batches each pass takes; nothing if they run in a loop.

        Args:
            count: Micro-batches that may be folded: those of an update, or of a call.
            arguments: What the program takes for one of them.
        """
        if not self.is_on or count < 2:
            return ()
        if count not in self._sizes:
            self._sizes[count] = self._decide(count, arguments)
        return self._sizes[count]

    def _decide(self, count: int, arguments: Sequence[Tensor]) -> tuple[int, ...]:
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
        num_passes = -(-count // min(count, most))
        size, longer = divmod(count, num_passes)
        _keep_freed_memory(split.bytes_per_micro_batch * (size + bool(longer)))
        return (size + 1,) * longer + (size,) * (num_passes - longer)

    def of_size(self, count: int) -> Pass:
        """The pass for so many micro-batches, which `sizes` gave."""
        if count not in self._passes:
            if self._split is None:
                raise AssertionError("`sizes` decides first")
            self._passes[count] = Pass(self._split, count)
        return self._passes[count]

    def is_verified(self, sizes: Sequence[int]) -> bool:
        """Whether passes of these sizes were held against the loop."""
        return self._verified.issuperset(sizes)

    def was_verified(self, sizes: Sequence[int]) -> None:
        """They were, and gave the same."""
        self._verified.update(sizes)

    def give_up(self, reason: str) -> None:
        """Run micro-batches in a loop from now on."""
        self.is_on = False
        self.failure = reason
        self._passes.clear()
        logger.warning(
            "Micro-batches run one after the other, not folded into one pass: %s",
            reason,
        )


def _keep_freed_memory(num_bytes: int) -> None:
    """Have the C library keep the memory that one pass frees for the next.

    glibc gives what is free at the end of the heap back to the system, and clears it
    again for each pass: a quarter of its time, measured. Whenever a block is freed that
    is larger than all before, up to 32 MiB, it keeps twice as much from then on
    (mallopt(3), `M_MMAP_THRESHOLD`). So one is, without being written to.
    """
    torch.empty(min(num_bytes, _LARGEST_BLOCK), dtype=torch.uint8)


def _is_seen_outside(target: object) -> bool:
    return any(original(target) is function for function in _SEEN_OUTSIDE)
