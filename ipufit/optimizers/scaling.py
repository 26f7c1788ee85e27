# SPDX-License-Identifier: Apache-2.0
"""Loss scaling that grows during training."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ipufit.errors import ConfigError

from .checks import check_number, check_whole

FLOAT16_LOSS_SCALING = 128.0
"""Loss scaling of float16 training where the user gives none.

Graphcore's CNN training begins with it. It keeps most of the gradients that float16
would lose, and leaves room below the largest float16, 65504, where gradients are sums.
"""


@dataclass(frozen=True)
class LossScaleRamp:
    """Multiply the loss scaling by a factor at regular intervals.

    Gradients shrink during training, so float16 can take a larger scaling later.
    Updates are counted over all fits since `compile`. The velocity of SGD with
    `use_combined_accum=True` is scaled too, unless `velocity_scaling` is given.

    Args:
        initial: Scaling of the first updates.
        factor: Factor by which the scaling grows; above 1.
        every_updates: Number of updates between two steps; None if `every_epochs` is
            given.
        maximum: Largest scaling; 32768, the largest power of 2 in float16, by default.
        every_epochs: Number of epochs between two steps, whole or not. `fit` converts
            it to updates, rounded to the nearest.

    Raises:
        ConfigError: A value is out of range.

    Example:
        >>> ramp = LossScaleRamp(128, factor=2, every_updates=1000, maximum=512)
        >>> [ramp.value(update) for update in (0, 999, 1000, 2000, 9000)]
        [128.0, 128.0, 256.0, 512.0, 512.0]
    """

    initial: float
    factor: float
    every_updates: int | None = None
    maximum: float = 32768.0
    every_epochs: float | None = None

    def __post_init__(self) -> None:
        where = "LossScaleRamp"
        check_number(where, "initial", self.initial, above=0)
        check_number(where, "factor", self.factor, above=1)
        if self.every_epochs is None:
            check_whole(where, "every_updates", self.every_updates, least=1)
        else:
            check_number(where, "every_epochs", self.every_epochs, above=0)
            if self.every_updates is not None:
                raise ConfigError(
                    f"LossScaleRamp has every_updates={self.every_updates} and "
                    f"every_epochs={self.every_epochs}. Give one of them."
                )
        check_number(where, "maximum", self.maximum, above=0)
        if self.maximum < self.initial:
            raise ConfigError(
                f"LossScaleRamp has maximum={self.maximum}, which is less than "
                f"initial={self.initial}. Raise maximum, or lower initial."
            )

    def in_updates(self, updates_per_epoch: int) -> LossScaleRamp:
        """Return a ramp with `every_epochs` converted to updates.

        Example:
            >>> LossScaleRamp(1, 2, every_epochs=1.5).in_updates(100).every_updates
            150
        """
        if self.every_epochs is None:
            return self
        every = max(1, math.floor(self.every_epochs * updates_per_epoch + 0.5))
        return replace(self, every_updates=every, every_epochs=None)

    def value(self, update: int) -> float:
        """Compute the scaling of an update.

        Args:
            update: The update's index, from 0.

        Returns:
            `min(maximum, initial * factor ** (update // every_updates))`.

        Example:
            >>> LossScaleRamp(1, factor=4, every_updates=1, maximum=8).value(1)
            4.0
        """
        # Before `fit` knows the length of an epoch, no update was made.
        steps = update // self.every_updates if self.every_updates else 0
        # More steps stay at the maximum; their power would overflow.
        enough = math.ceil(math.log(self.maximum / self.initial, self.factor))
        if steps > enough:
            return float(self.maximum)
        return float(min(self.maximum, self.initial * self.factor**steps))
