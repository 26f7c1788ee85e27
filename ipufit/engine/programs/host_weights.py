# SPDX-License-Identifier: Apache-2.0
"""The weights of the user's module: whether they or those of a program are newer."""

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
        """Make weights plain before a program trains.

        Args:
            program: The one that is ahead, if there is one.
        """
        if self._ahead is None:
            program.wrappers.take_off()
            self._exact.remember(program.weights)

    def end_call(self, program: TrainingProgram) -> None:
        """Note that a program has trained, so that it is ahead.

        Args:
            program: The one that was given to `begin_call`.
        """
        if self._ahead is None:
            program.wrappers.put_on(self.bring)
        self._ahead, program.on_device, program.must_compare = program, None, False

    def bring(self) -> None:
        """Bring the newest weights to the host; the classes of weights stay."""
        program = self._ahead
        if program is not None:
            with self.shown():
                program.on_device = fingerprint(program.weights)
                program.must_compare = True
            self._ahead = None

    def bring_for_good(self, program: TrainingProgram | None) -> None:
        """Bring the newest weights, and make them plain.

        Args:
            program: The one whose classes weights may have; None if there is none.
        """
        self.bring()
        if program is not None:
            program.wrappers.take_off()

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
        """Let the host's weights count, whatever a program has learnt."""
        self._ahead = None
