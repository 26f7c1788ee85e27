# SPDX-License-Identifier: Apache-2.0
"""Compiled programs, and those that a model keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Iterator, TypeVar

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit._spans import span
from ipufit.engine.baked_in.values import BakedInValues
from ipufit.engine.traced.heads import Findings
from ipufit.engine.traced.step import Step
from ipufit.engine.weights.counters import Counters
from ipufit.engine.weights.fingerprint import Fingerprint
from ipufit.engine.weights.host_values import host_tensors
from ipufit.engine.weights.modes import TrainedParts
from ipufit.engine.weights.wrapping import Wrappers

from .call_errors import refuse_index

KEPT_PROGRAMS = 4
"""Programs of a kind that a model keeps: those that were used last."""


@dataclass(eq=False)
class Program:
    """A compiled program of the user's module.

    Attributes:
        executor: PopTorch's executor.
        step: The module that was traced.
        num_micro_batches: Micro-batches of a call, over all replicas.
        baked_in: Values that its code has computed with.
        on_device: Fingerprint of the weights that the device has; None if unknown.
        must_compare: Whether the device's weights have to be compared with the host's
            before the next call.
    """

    executor: poptorch.PoplarExecutor
    step: Step
    num_micro_batches: int
    baked_in: BakedInValues
    on_device: Fingerprint | None
    must_compare: bool = field(default=True, init=False)

    @property
    def findings(self) -> Findings:
        """Everything that its trace has found out."""
        return self.step.findings

    @property
    def weights(self) -> list[Tensor]:
        """The host's tensors that its device has copies of, those of losses too."""
        return self.step.weights

    def run(self, batch: list[Tensor]) -> Any:
        """Make one call, and give all that the program returns.

        Args:
            batch: Tensors of the batch; the host's values are added.

        Raises:
            DataError: The batch has an index that doesn't exist.
        """
        values = host_tensors(self.step.host_values, self.num_micro_batches)
        try:
            with span("device call"):
                return self.executor(*batch, *values)
        except (IndexError, RuntimeError) as error:
            refuse_index(error, self.step.module, batch)
            raise


@dataclass(eq=False)
class TrainingProgram(Program):
    """A compiled program that updates the weights.

    Attributes:
        wrappers: Classes that PopTorch has given to the weights.
        optimizer: The one whose values and state the device has, or gets when it is
            attached.
        random_state: State of the device's generator when the program was compiled;
            None if it has no seed.
        sent: Values of the optimiser that were sent last; empty if the device may have
            others.
        counters: Buffers that the host counts up.
        trained_parts: Parts of the module that it trains.
    """

    wrappers: Wrappers
    optimizer: torch.optim.Optimizer
    random_state: list[int] | None
    sent: tuple[object, ...]
    counters: Counters
    trained_parts: TrainedParts


ProgramT = TypeVar("ProgramT", bound=Program)


class KeptPrograms(Generic[ProgramT]):
    """Programs by all that they were built for; the one used last comes last."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, ProgramT]] = []

    def __iter__(self) -> Iterator[ProgramT]:
        """The programs, beginning with the one that was used longest ago."""
        return iter([program for _, program in self._kept])

    def get(self, key: object) -> ProgramT | None:
        """Find the program of a key, which counts as used now.

        A program is destroyed, and not found, if its code would compute with other
        values now.
        """
        for entry in self._kept:
            if entry[0] == key:
                self._kept.remove(entry)
                if entry[1].baked_in.changed() is not None:
                    entry[1].executor.destroy()
                    return None
                self._kept.append(entry)
                return entry[1]
        return None

    def make_room(self) -> None:
        """Destroy the program that was used longest ago, if no other can be kept."""
        while len(self._kept) >= KEPT_PROGRAMS:
            self._kept.pop(0)[1].executor.destroy()

    def add(self, key: object, program: ProgramT) -> None:
        """Keep a program."""
        self._kept.append((key, program))

    def drop_incomplete(self) -> None:
        """Destroy programs that may have baked in values which nobody compares."""
        for entry in [e for e in self._kept if not e[1].baked_in.is_complete]:
            self._kept.remove(entry)
            entry[1].executor.destroy()

    def clear(self) -> None:
        """Destroy all programs."""
        while self._kept:
            self._kept.pop()[1].executor.destroy()


def ready(program: Any) -> Any:
    """The program, which was prepared before it is used."""
    if program is None:
        raise RuntimeError("the program was not prepared")
    return program
