# SPDX-License-Identifier: Apache-2.0
"""Monitoring of one metric: its direction, and whether it improves."""

from __future__ import annotations

import math
import warnings
from typing import Any, Mapping

import numpy as np

from ipufit.errors import ConfigError, IpufitWarning

from .base import Callback
from .messages import say

MODES = ("auto", "min", "max")


class MonitorCallback(Callback):
    """Base of callbacks that monitor a metric in the logs.

    Args:
        monitor: Name of the metric, such as `"val_loss"`.
        mode: `"min"` or `"max"`, whichever is better; `"auto"` asks the metrics. Any
            other mode is taken as `"auto"`, with a warning, as in Keras.
        min_delta: Change that an improvement must exceed; its sign doesn't matter.
        verbose: 1 or more lets `say` print its messages.
        best: Value that the first one must beat, if any.

    Attributes:
        best: Best value so far.
        direction: `"min"` or `"max"`; None before the first value of a run.
    """

    def __init__(
        self,
        monitor: str,
        mode: str,
        min_delta: float,
        verbose: int,
        best: float | None = None,
    ) -> None:
        if mode not in MODES:
            warnings.warn(
                f"{type(self).__name__} mode '{mode}' is unknown, fallback to auto "
                "mode.",
                IpufitWarning,
                stacklevel=3,
            )
            mode = "auto"
        self.monitor = monitor
        self.mode = mode
        self.min_delta = abs(min_delta)
        self.verbose = verbose
        self.best = best
        self.direction: str | None = None

    def say(self, message: str) -> None:
        """Print a line if `verbose` is set, in the first process only."""
        if self.verbose > 0 and self.run.processes.is_first:
            say(message)

    @property
    def state_name(self) -> str:
        """Name in checkpoints: the class and the metric."""
        return f"{type(self).__name__}({self.monitor})"

    def begin_monitoring(self) -> None:
        """Reset the direction, which depends on the new run's metrics."""
        self.direction = None

    def improves(self, value: float, reference: float | None) -> bool:
        """Return whether a value is better than another by more than `min_delta`.

        Args:
            value: New value.
            reference: Value to beat; None is beaten by every number.

        Raises:
            ConfigError: If the mode is `"auto"`, and no metric has a direction.
        """
        direction = self.known_direction()
        return is_improvement(value, reference, direction, self.min_delta)

    def known_direction(self) -> str:
        """Return whether the metric's `"min"` or `"max"` is better.

        Raises:
            ConfigError: If the mode is `"auto"`, and no metric has a direction.
        """
        if self.direction is None and self.mode != "auto":
            self.direction = self.mode
        elif self.direction is None:
            self.direction = direction_of(self.monitor, self.run.directions)
        if self.direction is None:
            known = ", ".join(sorted(self.run.directions)) or "none"
            raise ConfigError(
                f"{type(self).__name__}(monitor={self.monitor!r}) can't tell whether "
                "more or less of it is better. Pass mode='min' or mode='max'. Figures "
                f"whose direction is known: {known}; each also with val_ before it."
            )
        return self.direction


def direction_of(monitor: str, directions: Mapping[str, str]) -> str | None:
    """Return whether a metric's `"min"` or `"max"` is better; None if unknown.

    The direction of a loss is always known.

    Args:
        monitor: Name in the logs, with or without `val_`.
        directions: `"min"` or `"max"` by name, without `val_`.

    Example:
        >>> direction_of("val_accuracy", {"accuracy": "max"})
        'max'
        >>> direction_of("val_depth_loss", {})
        'min'
    """
    name = monitor[len("val_") :] if monitor.startswith("val_") else monitor
    if name in directions:
        return directions[name]
    return "min" if name == "loss" or name.endswith("_loss") else None


def is_improvement(
    value: float, reference: float | None, direction: str, min_delta: float = 0.0
) -> bool:
    """Return whether a value is better than another by more than `min_delta`.

    Like Keras's, the test is strict and made in float32, so `0.7` is no improvement
    over `0.8` by more than `0.1`, whatever float64 leaves in the last digit.

    Args:
        value: New value. NaN is never an improvement.
        reference: Value to beat; every number beats None and NaN.
        direction: `"min"` or `"max"`.
        min_delta: Change to exceed, 0 or more.

    Example:
        >>> is_improvement(2.0, 3.0, "min", min_delta=0.5)
        True
        >>> is_improvement(float("nan"), None, "min")
        False
    """
    if math.isnan(value):
        return False
    if reference is None or math.isnan(reference):
        return True
    sign = 1.0 if direction == "min" else -1.0
    with np.errstate(over="ignore"):  # beyond float32 is infinite
        shifted, best = np.float32(value + sign * min_delta), np.float32(reference)
    return bool(shifted < best if direction == "min" else shifted > best)


def warn_unavailable(what: str, logs: Mapping[str, Any], end: str = "") -> None:
    """Warn that a metric isn't in the logs.

    Args:
        what: Beginning of the message.
        logs: Figures that are there.
        end: End of the message.
    """
    warnings.warn(
        f"{what} which is not available. Available metrics are: {','.join(logs)}{end}",
        IpufitWarning,
        stacklevel=3,
    )
