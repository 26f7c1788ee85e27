# SPDX-License-Identifier: Apache-2.0
"""Monitoring one figure: which way is better, and did it get better."""

from __future__ import annotations

import math
import warnings
from typing import Any, Mapping

import numpy as np

from ipufit.errors import ConfigError, IpufitWarning

from .base import Callback

MODES = ("auto", "min", "max")


class MonitorCallback(Callback):
    """Base of callbacks that watch a figure of the logs.

    Attributes:
        monitor: Its name, such as `"val_loss"`.
        mode: `"min"` or `"max"`, whichever is better; `"auto"` asks the metrics.
        min_delta: A change must be larger than this to count.
        best: The best value so far; None before the first.
        direction: `"min"` or `"max"`; None before the first value of a run.

    Args:
        monitor: See above.
        mode: See above; any other is taken as `"auto"`, with a warning, as in Keras.
        min_delta: See above; its sign doesn't matter.
        best: What the first value has to beat, if anything.
    """

    def __init__(
        self, monitor: str, mode: str, min_delta: float, best: float | None = None
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
        self.best = best
        self.direction: str | None = None

    @property
    def state_name(self) -> str:
        """Its class and its figure: states of two figures are not exchanged."""
        return f"{type(self).__name__}({self.monitor})"

    def begin_monitoring(self) -> None:
        """A run begins: its metrics will say which way is better."""
        self.direction = None

    def improves(self, value: float, reference: float | None) -> bool:
        """Whether a value is better than another by more than `min_delta`.

        Args:
            value: The new one.
            reference: What it has to beat.

        Returns:
            See `is_improvement`.

        Raises:
            ConfigError: The mode is `"auto"`, and no metric says which way it is.
        """
        direction = self.known_direction()
        return is_improvement(value, reference, direction, self.min_delta)

    def known_direction(self) -> str:
        """Which way the figure gets better.

        Returns:
            `"min"` or `"max"`.

        Raises:
            ConfigError: The mode is `"auto"`, and no metric says which way it is.
        """
        if self.direction is None:
            self.direction = self._find_direction()
        return self.direction

    def _find_direction(self) -> str:
        if self.mode != "auto":
            return self.mode
        direction = direction_of(self.monitor, self.run.directions)
        if direction is None:
            known = ", ".join(sorted(self.run.directions)) or "none"
            raise ConfigError(
                f"{type(self).__name__}(monitor={self.monitor!r}) can't tell whether "
                "more or less of it is better. Pass mode='min' or mode='max'. Figures "
                f"whose direction is known: {known}; each also with val_ before it."
            )
        return direction


def direction_of(monitor: str, directions: Mapping[str, str]) -> str | None:
    """Which way a figure gets better.

    Args:
        monitor: Its name in the logs; one leading `val_` doesn't matter.
        directions: `"min"` or `"max"` by name, without `val_`.

    Returns:
        `"min"` or `"max"`, None if unknown. Losses are always known.

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
    """Whether a value is better than another by more than `min_delta`.

    Like Keras's, the test is strict and made in float32, so `0.7` is no improvement
    over `0.8` by more than `0.1`, whatever float64 leaves in the last digit.

    Args:
        value: The new one. NaN is never an improvement.
        reference: What it has to beat; every number beats None and NaN.
        direction: `"min"` or `"max"`.
        min_delta: 0 or more.

    Returns:
        Whether it is.

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
    """Warn that a figure isn't in the logs.

    Args:
        what: Begins the sentence.
        logs: What there is instead.
        end: Ends it.
    """
    warnings.warn(
        f"{what} which is not available. Available metrics are: {','.join(logs)}{end}",
        IpufitWarning,
        stacklevel=3,
    )
