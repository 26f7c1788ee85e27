# SPDX-License-Identifier: Apache-2.0
"""Callbacks that set the learning rate."""

from __future__ import annotations

import inspect
import math
import numbers
from typing import Any, Callable, ClassVar, Mapping, Sequence

import numpy as np

from ipufit._kinds import Kind, count, list_of, number, optional, whole
from ipufit.errors import ConfigError

from .base import Callback, check_argument, say
from .stopping import MonitorCallback, warn_unavailable


def set_learning_rate(
    optimizer: Any, rate: float, ratios: Sequence[float] = ()
) -> list[float]:
    """Set the rate of the first parameter group, and scale the other groups' rates.

    Args:
        optimizer: An optimizer of torch or `poptorch.optim`.
        rate: New rate of the first group.
        ratios: Result of the last call, used while the first group's rate is zero.

    Returns:
        Rate of each group divided by that of the first.

    Example:
        >>> import torch
        >>> groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in (0.5, 1.0)]
        >>> sgd = torch.optim.SGD(groups, lr=0.5)
        >>> ratios = set_learning_rate(sgd, 0.0)
        >>> ratios = set_learning_rate(sgd, 0.25, ratios)
        >>> [group["lr"] for group in sgd.param_groups]
        [0.25, 0.5]
    """
    groups = optimizer.param_groups
    first = learning_rate(optimizer)
    if first != 0:
        kept = [float(group["lr"]) / first for group in groups]
    else:
        kept = list(ratios) if len(ratios) == len(groups) else [1.0] * len(groups)
    for group, ratio in zip(groups, kept):
        group["lr"] = rate * ratio
    return kept


def learning_rate(optimizer: Any) -> float:
    """Return the learning rate of an optimizer's first parameter group.

    Example:
        >>> import torch
        >>> learning_rate(torch.optim.SGD([torch.zeros(1)], lr=0.5))
        0.5
    """
    return float(optimizer.param_groups[0]["lr"])


class RateCallback(Callback):
    """Base of callbacks that set the learning rate; their state has the `rates`."""

    @property
    def rates(self) -> list[float]:
        """Learning rates of the optimizer's parameter groups."""
        return [float(group["lr"]) for group in self.model.optimizer.param_groups]

    @rates.setter
    def rates(self, rates: list[float]) -> None:
        for group, rate in zip(self.model.optimizer.param_groups, rates):
            group["lr"] = rate

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse other keys and kinds, and rates for more or fewer groups."""
        super().check_state(state)
        groups, rates = self.model.optimizer.param_groups, state["rates"]
        if len(rates) != len(groups):
            raise ConfigError(
                f"The state of {type(self).__name__} has the rates of {len(rates)} "
                f"parameter groups, and the optimizer has {len(groups)}. Compile with "
                "the optimizer of the interrupted run."
            )


def refuse_schedule(model: Any, who: str) -> None:
    """Refuse a model whose schedule sets the learning rate too.

    Args:
        model: An `IPUModel`.
        who: Name of the callback, for the message.

    Raises:
        ConfigError: If the model was compiled with a schedule.
    """
    if model.has_lr_schedule:
        raise ConfigError(
            f"{who} sets the learning rate, and so does the schedule that compile() "
            "got. Use one of the two."
        )


class LearningRateScheduler(RateCallback):
    """Set the learning rate of every epoch by a function.

    As in Keras. The function sets the rate of the first parameter group, which is
    `learning_rate` in the logs. The other groups keep their ratio to it.

    Args:
        schedule: `schedule(epoch, learning_rate)`, or just `schedule(epoch)`, with a
            0-based epoch. It returns the new rate, a float.
        verbose: 1 prints the rate of every epoch.

    Raises:
        ConfigError: If `schedule` isn't a function of one or two arguments, or returns
            no float of 0 or more. When `fit` begins, if the model was compiled with a
            schedule.

    Example:
        >>> halving = LearningRateScheduler(lambda epoch, rate: rate / 2)
        >>> halving = LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    """

    saved_attributes: ClassVar[Mapping[str, Kind]] = {
        "group_ratios": list_of(number),
        "rates": list_of(number),
    }

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
        name = f"schedule({epoch}, ...)"
        check_argument(self, name, float(rate), least=0, below=math.inf)
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


class ReduceLROnPlateau(RateCallback, MonitorCallback):
    """Reduce the learning rate when a metric hasn't improved for some epochs.

    As in Keras. All parameter groups are reduced by the same ratio. The rate of the
    first group is `learning_rate` in the logs of each epoch.

    Args:
        monitor: Name of the metric in the logs.
        factor: Factor of each reduction, below 1.
        patience: Number of epochs without improvement after which to reduce.
        verbose: 1 prints a line for each reduction.
        mode: `"min"`, `"max"`, or `"auto"`.
        min_delta: Smallest change that counts as an improvement.
        cooldown: Number of epochs to pause after a reduction.
        min_lr: Lower bound of the rate.

    Attributes:
        best: Best value of this run.
        wait: Number of epochs since the last improvement.
        cooldown_counter: Number of epochs left of the pause.

    Raises:
        ConfigError: If `factor` is 1 or more, or an argument is negative. When `fit`
            begins, if the model was compiled with a schedule. At the metric's first
            value, if `mode="auto"` and its direction isn't known.

    Example:
        >>> ReduceLROnPlateau("loss", factor=2.0)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: ReduceLROnPlateau does not support a factor >= 1...
    """

    saved_attributes: ClassVar[Mapping[str, Kind]] = {
        "best": optional(number),
        "wait": count,
        "cooldown_counter": whole,
        "rates": list_of(number),
    }

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta, verbose)
        for name, value in (("factor", factor), ("patience", patience)):
            check_argument(self, name, value, least=0)
        check_argument(self, "cooldown", cooldown, numbers.Integral, least=0)
        check_argument(self, "min_lr", min_lr, least=0, below=math.inf)
        if factor >= 1.0:
            raise ConfigError(
                "ReduceLROnPlateau does not support a factor >= 1.0. Received "
                f"factor={factor}"
            )
        self.factor = factor
        self.patience = patience
        self.cooldown = cooldown
        self.min_lr = min_lr
        self._reset()

    def _reset(self) -> None:
        self.best = None
        self.wait = 0
        self.cooldown_counter = 0

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Reset the values of an earlier run."""
        refuse_schedule(self.model, "ReduceLROnPlateau")
        self._reset()
        self.begin_monitoring()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Add the rate to the logs, and reduce it after `patience` epochs."""
        logs["learning_rate"] = learning_rate(self.model.optimizer)
        if logs.get(self.monitor) is None:
            warn_unavailable(
                f"Learning rate reduction is conditioned on metric `{self.monitor}`",
                logs,
                end=".",
            )
            return
        value = float(logs[self.monitor])
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.wait = 0
        if self.improves(value, self.best):
            self.best = value
            self.wait = 0
        elif self.cooldown_counter <= 0:
            self.wait += 1
            if self.wait >= self.patience:
                self._reduce(epoch)

    def _reduce(self, epoch: int) -> None:
        old = learning_rate(self.model.optimizer)
        if np.float32(old) <= np.float32(self.min_lr):  # equal but for rounding
            return
        new = max(old * self.factor, self.min_lr)
        set_learning_rate(self.model.optimizer, new)
        self.say(
            f"\nEpoch {epoch + 1}: ReduceLROnPlateau reducing learning rate to {new}."
        )
        self.cooldown_counter = self.cooldown
        self.wait = 0
