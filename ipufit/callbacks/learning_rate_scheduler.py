# SPDX-License-Identifier: Apache-2.0
"""`LearningRateScheduler`: a function sets the learning rate of each epoch."""

from __future__ import annotations

import inspect
from typing import Any, Callable, ClassVar, Mapping

import numpy as np

from ipufit._kinds import Kind, list_of, number
from ipufit.errors import ConfigError

from .learning_rate import (
    RateCallback,
    learning_rate,
    refuse_schedule,
    set_learning_rate,
)
from .messages import say


class LearningRateScheduler(RateCallback):
    """Set the learning rate of every epoch by a function.

    As in Keras. The rate is that of the first parameter group, and in the logs as
    `learning_rate`; the other groups keep their ratio to it.

    Args:
        schedule: `schedule(epoch, learning_rate)`, or just `schedule(epoch)`, with a
            0-based epoch. It returns the new rate, a float.
        verbose: 1 prints the rate of every epoch.

    Raises:
        ConfigError: If `schedule` isn't a function of one or two arguments, or returns
            no float. When `fit` begins, if the model was compiled with a schedule.

    Example:
        >>> halving = LearningRateScheduler(lambda epoch, rate: rate / 2)
        >>> halving = LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    """

    saved_attributes = ("group_ratios",)
    saved_kinds: ClassVar[Mapping[str, Kind]] = {"group_ratios": list_of(number)}

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        self.schedule = schedule
        self.verbose = verbose
        self._takes_rate = _takes_two(schedule)
        self.group_ratios: list[float] = []

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Refuse a model whose schedule sets the rate too."""
        refuse_schedule(self.model, "LearningRateScheduler")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Set the rate of the epoch."""
        optimizer = self.model.optimizer
        before = (learning_rate(optimizer),) if self._takes_rate else ()
        rate = self.schedule(epoch, *before)
        if not isinstance(rate, (float, np.float32)):  # np.float64 is a float
            raise ConfigError(
                "The output of the `schedule` function should be a float. Got: "
                f"{rate!r}"
            )
        self.group_ratios = set_learning_rate(optimizer, float(rate), self.group_ratios)
        if self.verbose > 0:
            say(
                f"\nEpoch {epoch + 1}: LearningRateScheduler setting learning rate to "
                f"{rate}."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Add the rate to the logs."""
        logs["learning_rate"] = learning_rate(self.model.optimizer)


def _takes_two(schedule: Any) -> bool:
    """Return whether a schedule takes the rate besides the epoch."""
    if not callable(schedule):
        raise ConfigError(
            f"schedule={schedule!r} is no function schedule(epoch, learning_rate)."
        )
    try:
        signature = inspect.signature(schedule)
    except ValueError:  # some functions written in C have none
        return True
    for arguments in ((0, 0.0), (0,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return len(arguments) == 2
    raise ConfigError(
        f"schedule{signature} takes neither (epoch, learning_rate) nor (epoch)."
    )
