# SPDX-License-Identifier: Apache-2.0
"""`steps_per_epoch`: epochs that are longer or shorter than a pass over the data."""

from __future__ import annotations

from typing import Iterator

import torch

from ipufit.batching import BatchPlan, check_positive
from ipufit.errors import ConfigError, DataError

from .calls import Call
from .training import TrainingBatches


class Epochs:
    """Cuts training calls into epochs.

    Without `steps_per_epoch` an epoch is one pass. With it, an epoch goes on where the
    last one ended, and begins a new pass only if the last pass was complete (Keras's
    rule). An epoch that runs out of data in the middle is cut short.

    Args:
        batches: The calls of a pass.
        plan: The factors of a call.
        steps_per_epoch: Updates per epoch; None for whole passes.
        num_epochs: Number of epochs to come.
        calls_done: Calls of the first epoch that an interrupted run has made.

    Raises:
        ConfigError: `steps_per_epoch` is no multiple of the updates of a call.
        DataError: A generator would have to give several passes.

    Attributes:
        ran_out: Whether the last epoch was cut short.
        is_spent: Whether the data is a generator that has ended.
    """

    def __init__(
        self,
        batches: TrainingBatches,
        plan: BatchPlan,
        steps_per_epoch: int | None,
        num_epochs: int,
        calls_done: int = 0,
    ) -> None:
        self._batches = batches
        self._iterator: Iterator[Call] | None = None
        self._calls: int | None = None
        self._calls_done = calls_done
        self.ran_out = self.is_spent = False
        if steps_per_epoch is not None:
            check_positive("steps_per_epoch", steps_per_epoch)
            calls, rest = divmod(steps_per_epoch, plan.device_iterations)
            if rest:
                near = [n * plan.device_iterations for n in (calls, calls + 1) if n]
                raise ConfigError(
                    f"steps_per_epoch={steps_per_epoch} is no multiple of the "
                    f"{plan.device_iterations} updates that a call makes "
                    f"(device_iterations). The nearest are {near}."
                )
            self._calls = calls
        elif num_epochs > 1 and batches.source.is_one_shot:
            raise DataError(
                f"`x` is a generator, which can be gone through once, and epochs ask "
                f"for {num_epochs} passes. Give steps_per_epoch, or pass a loader or a "
                "dataset, which can be begun anew."
            )

    @property
    def generators(self) -> list[torch.Generator]:
        """Random generators of the user's own loader."""
        return list(self._batches.source.generators)

    @property
    def num_calls(self) -> int | None:
        """Calls per epoch; None if unknown."""
        return self._batches.num_calls if self._calls is None else self._calls

    def __iter__(self) -> Iterator[Call]:
        """The calls of the next epoch."""
        if self._calls is None:
            yield from self._batches
            return
        self.ran_out = False
        done, self._calls_done = self._calls_done, 0
        for number in range(done, self._calls):
            call = self._next(may_restart=number == 0)
            if call is None:
                self.ran_out = True
                return
            yield call

    def _next(self, *, may_restart: bool) -> Call | None:
        """The next call; None at the end of the data."""
        if self._iterator is None:
            self._iterator = iter(self._batches)
        call = next(self._iterator, None)
        if call is None:
            self._iterator = None
            self.is_spent = self._batches.source.is_one_shot
            if may_restart and not self.is_spent:
                return self._next(may_restart=False)
        return call
