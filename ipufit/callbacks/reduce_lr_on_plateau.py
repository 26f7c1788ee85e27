# SPDX-License-Identifier: Apache-2.0
"""`ReduceLROnPlateau`: reduce the learning rate when a metric stops improving."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping

import numpy as np

from ipufit._kinds import Kind, count, number, optional, whole
from ipufit.errors import ConfigError

from .learning_rate import (
    RateCallback,
    learning_rate,
    refuse_schedule,
    set_learning_rate,
)
from .monitor import MonitorCallback, warn_unavailable


class ReduceLROnPlateau(RateCallback, MonitorCallback):
    """Reduce the learning rate when a figure hasn't improved for some epochs.

    As in Keras. The rate is that of the first parameter group, and in the logs of each
    epoch as `learning_rate`; all groups are reduced by the same ratio.

    Args:
        monitor: Name of the figure in the logs.
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
        ConfigError: If `factor` is 1 or more. When `fit` begins, if the model was
            compiled with a schedule. At the figure's first value, if `mode="auto"` and
            no metric has its direction.

    Example:
        >>> ReduceLROnPlateau("loss", factor=2.0)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: ReduceLROnPlateau does not support a factor >= 1...
    """

    saved_attributes = ("best", "wait", "cooldown_counter")
    saved_kinds: ClassVar[Mapping[str, Kind]] = {
        "best": optional(number),
        "wait": count,
        "cooldown_counter": whole,
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
        if self._is_cooling_down():
            self.cooldown_counter -= 1
            self.wait = 0
        if self.improves(value, self.best):
            self.best = value
            self.wait = 0
        elif not self._is_cooling_down():
            self.wait += 1
            if self.wait >= self.patience:
                self._reduce(epoch)

    def _is_cooling_down(self) -> bool:
        return self.cooldown_counter > 0

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
