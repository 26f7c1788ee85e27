# SPDX-License-Identifier: Apache-2.0
"""Compiled programs, and how many of them a model keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Iterator, TypeVar

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.engine.baked_in.values import BakedInValues
from ipufit.engine.traced.step import Findings, Step
from ipufit.engine.weights.counters import Counters
from ipufit.engine.weights.fingerprint import Fingerprint
from ipufit.engine.weights.host_values import host_tensors
from ipufit.engine.weights.modes import TrainedParts
from ipufit.engine.weights.wrapping import Wrappers

from .call_errors import refuse_index

KEPT_PROGRAMS = 4
"""How many programs of a kind a model keeps: those that were used last."""


@dataclass(eq=False)
class Program:
    """A compiled program of the user's module.

    Attributes:
        executor: PopTorch's.
        step: What was traced.
        num_micro_batches: In a call, over all replicas.
        baked_in: The values that its code has computed with.
        held: The weights that its device has; None if that isn't known.
        is_due: Whether the device's weights have to be compared with the host's
            before the next call.
    """

    executor: poptorch.PoplarExecutor
    step: Step
    num_micro_batches: int
    baked_in: BakedInValues
    held: Fingerprint | None
    is_due: bool = field(default=True, init=False)

    @property
    def findings(self) -> Findings:
        """What its trace has found out."""
        return self.step.findings

    @property
    def weights(self) -> list[Tensor]:
        """The host's tensors that its device has copies of, those of losses too."""
        return self.step.weights

    def run(self, batch: list[Tensor]) -> Any:
        """What one call returns.

        Args:
            batch: Its tensors; the host's values are added.

        Raises:
            DataError: An index among them doesn't exist.
        """
        values = host_tensors(self.step.host_values, self.num_micro_batches)
        try:
            return self.executor(*batch, *values)
        except (IndexError, RuntimeError) as error:
            refuse_index(error, self.step.module, batch)
            raise


@dataclass(eq=False)
class TrainingProgram(Program):
    """A compiled program that updates the weights.

    Attributes:
        wrappers: The classes that PopTorch has given to the weights.
        optimizer: The one whose values and state the device has, or gets when it is
            attached.
        random_state: The device's when it was compiled; None if it has no seed.
        sent: The values of the optimiser that were sent last; empty if the device may
            have others.
        counters: What the host counts for it.
        trained_parts: What it trains.
    """

    wrappers: Wrappers
    optimizer: torch.optim.Optimizer
    random_state: list[int] | None
    sent: tuple[object, ...]
    counters: Counters
    trained_parts: TrainedParts


ProgramT = TypeVar("ProgramT", bound=Program)


class KeptPrograms(Generic[ProgramT]):
    """Programs by what they were compiled for; the one used last comes last."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, ProgramT]] = []

    def __iter__(self) -> Iterator[ProgramT]:
        """The programs, the one that was used longest ago first."""
        return iter([program for _, program in self._kept])

    def get(self, key: object) -> ProgramT | None:
        """The program that was compiled for `key`, if there is one.

        It counts as used now. One whose code would compute with other values now
        isn't found, and is destroyed.
        """
        for index, (own_key, program) in enumerate(self._kept):
            if own_key == key:
                del self._kept[index]
                if program.baked_in.changed() is not None:
                    program.executor.destroy()
                    return None
                self._kept.append((key, program))
                return program
        return None

    def make_room(self) -> None:
        """Destroy the program that was used longest ago, if no other can be kept."""
        while len(self._kept) >= KEPT_PROGRAMS:
            self._kept.pop(0)[1].executor.destroy()

    def add(self, key: object, program: ProgramT) -> None:
        """Keep a program, by what it was compiled for."""
        self._kept.append((key, program))

    def drop_unsure(self) -> None:
        """Destroy programs that may compute with values which nobody looks at."""
        for entry in [e for e in self._kept if not e[1].baked_in.is_complete]:
            self._kept.remove(entry)
            entry[1].executor.destroy()

    def clear(self) -> None:
        """Destroy all programs."""
        while self._kept:
            self._kept.pop()[1].executor.destroy()
