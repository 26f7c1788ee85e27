# SPDX-License-Identifier: Apache-2.0
"""The validations of a `fit`: after epochs, and after so many calls within them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

from ipufit._spans import awaited
from ipufit.callbacks import CallbackList, ProgressDisplay
from ipufit.data import Call, Epochs
from ipufit.state import RunState
from ipufit.types import Logs

from .evaluation import Evaluation
from .interruption import undone_if_evicted


@dataclass(frozen=True)
class Validations:
    """Validates the weights that training has reached, and keeps the figures.

    Attributes:
        evaluation: The evaluation on the validation's samples; None for none.
        every_calls: Calls of an epoch from one validation to the next; None for none
            within epochs.
        hooks: Callbacks of the run.
        run: State of the run, which has the epoch's last validation.
        display: Hears of compilations.
    """

    evaluation: Evaluation | None
    every_calls: int | None
    hooks: CallbackList
    run: RunState
    display: ProgressDisplay

    def between(self, calls: Epochs) -> Iterator[Call]:
        """Give the calls of an epoch, and validate before some of them.

        A validation comes before its next call is taken from the data. So a run that is
        saved meanwhile goes on with the validation.

        Args:
            calls: The calls of the epoch.

        Raises:
            EvictedError: The process was told to end.
        """
        self._validate_if_due(calls)
        for call in awaited(calls):
            yield call
            self._validate_if_due(calls)

    def at_end(self, calls: Epochs, *, is_validated: bool) -> Logs:
        """Validate after an epoch.

        Args:
            calls: The calls of the epoch.
            is_validated: Whether the end of the epoch is to be validated.

        Returns:
            Figures of the epoch's last validation; empty if it had none.

        Raises:
            EvictedError: The process was told to end.
        """
        if is_validated and self.run.validated_calls != self.run.calls:
            self._validate(calls)
        return self.run.validated

    def _validate_if_due(self, calls: Epochs) -> None:
        done = self.run.calls
        if self.every_calls is None or not done or done % self.every_calls:
            return
        if self.run.validated_calls != done:  # else the run was resumed after it
            self._validate(calls)

    def _validate(self, calls: Epochs) -> None:
        if self.evaluation is None:
            return
        with undone_if_evicted(self.run, calls.generators):
            self.evaluation.prepare(self.display)
            figures = self.evaluation.run(self.hooks, self.run)
        self.run.directions.update(self.evaluation.figures.directions)
        self.run.validated, self.run.validated_calls = figures, self.run.calls
