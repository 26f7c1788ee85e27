# SPDX-License-Identifier: Apache-2.0
"""The weights of the user's module: the newest ones, or those that a device is past."""

from __future__ import annotations

import contextlib
from typing import Iterator

from ipufit.engine.weights.fingerprint import fingerprint
from ipufit.engine.weights.wide import ExactWeights

from .programs import TrainingProgram


class HostWeights:
    """The weights of the user's module, and the program that has newer ones.

    While it has, whoever touches a weight of the module gets them all, and may change
    them: the program's next call compares.
    """

    def __init__(self) -> None:
        self._ahead: TrainingProgram | None = None
        self._exact = ExactWeights()

    def is_behind(self, program: object) -> bool:
        """Whether a program has newer weights."""
        return program is self._ahead

    def begin_call(self, program: TrainingProgram) -> None:
        """A program is about to train.

        Args:
            program: The one that is ahead, if there is one.
        """
        if self._ahead is None:
            program.wrappers.take_off()
            self._exact.remember(program.weights)

    def end_call(self, program: TrainingProgram) -> None:
        """A program has trained, so that it is ahead.

        Args:
            program: The one that `begin_call` was told of.
        """
        if self._ahead is None:
            program.wrappers.put_on(self.bring)
        self._ahead, program.held, program.is_due = program, None, False

    def bring(self) -> None:
        """Have the newest weights on the host; the classes of weights stay."""
        program = self._ahead
        if program is not None:
            with self.shown():
                program.held, program.is_due = fingerprint(program.weights), True
            self._ahead = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Have the newest weights on the host, plain and to be read only."""
        program = self._ahead
        if program is None:
            yield
            return
        self._ahead = None  # PopTorch itself touches weights when it fetches them
        program.wrappers.take_off()
        program.executor.copyWeightsToHostIfNeeded()
        self._exact.restore()
        try:
            yield
        finally:
            program.wrappers.put_on(self.bring)
            self._ahead = program

    def be_newest(self) -> None:
        """Have what is on the host count, whatever a program has learnt."""
        self._ahead = None
