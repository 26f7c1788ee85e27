# SPDX-License-Identifier: Apache-2.0
"""`LearningRateCurve`: the losses that `lr_find` has seen at each learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Sequence

from ipufit.callbacks.plots import Axes, Figure, axes_for, draw_curve

_FEWEST = 5
"""Losses that a suggestion needs."""

_PART = 20
"""Losses of which one on each side is in a mean over neighbours."""

_SMOOTHING = 0.9
"""Weight of the losses before in the running mean that shows that they diverge."""


@dataclass(frozen=True)
class LearningRateCurve:
    """The losses of a learning-rate range test.

    Attributes:
        rates: Learning rates in ascending order, evenly spaced in their logarithm.
        losses: Mean loss of the call that was made at each rate, NaN and infinities
            included.
        suggestion: The rate at which the loss fell most steeply, which is a good one to
            begin with; None if the loss didn't fall.
        stop_reason: The reason why there are fewer rates than were asked for; None if
            there are all.

    Example:
        >>> rates = [10.0 ** power for power in range(-6, 1)]
        >>> curve = LearningRateCurve.of(rates, [2.0, 2.0, 1.9, 1.5, 0.6, 0.4, 9.0])
        >>> curve.suggestion
        0.001
        >>> print(curve)
        Learning rates 1e-06 to 1: suggested 0.001
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    suggestion: float | None
    stop_reason: str | None = None

    @classmethod
    def of(
        cls,
        rates: Sequence[float],
        losses: Sequence[float],
        stop_reason: str | None = None,
    ) -> LearningRateCurve:
        """A curve with its suggestion."""
        suggestion = steepest_descent(rates, losses)
        return cls(tuple(rates), tuple(losses), suggestion, stop_reason)

    def __str__(self) -> str:
        """The range of the rates and the suggestion, in one line."""
        told = f"no suggestion, which needs {_FEWEST} losses"
        if self.suggestion is not None:
            told = f"suggested {self.suggestion:.3g}"
        elif len(self.rates) >= _FEWEST:
            told = "the loss never fell"
        why = "" if self.stop_reason is None else f" ({self.stop_reason})"
        return (
            f"Learning rates {self.rates[0]:.3g} to {self.rates[-1]:.3g}{why}: {told}"
        )

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """Draw the losses over the logarithm of the rates, and the suggestion.

        Args:
            axes: matplotlib's axes to draw in; by default new ones.

        Returns:
            The figure of matplotlib that has the axes.

        Raises:
            ConfigError: matplotlib isn't installed.
        """
        figure, (part,) = axes_for("LearningRateCurve.plot()", 1, axes)
        draw_curve(part, self.rates, self.losses)
        if self.suggestion is not None:
            part.axvline(
                self.suggestion,
                color="tab:orange",
                label=f"suggested {self.suggestion:.3g}",
            )
            part.legend()
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        if len(finite) > 1:  # what diverges would hide all that came before
            low, high = min(finite), max(finite[: max(2, len(finite) // 2)])
            margin = 0.2 * (high - low) or 1.0
            part.set_ylim(low - margin, high + margin)
        part.set_xscale("log")
        part.set_xlabel("learning rate")
        part.set_ylabel("loss")
        return figure


def steepest_descent(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Find the rate at which the loss falls most steeply over the logarithm of rates.

    The range test is Smith's ("Cyclical Learning Rates for Training Neural Networks",
    2015, arXiv:1506.01186, section 3.3), the rule that of fastai's `steep` and of
    Lightning's `suggestion()`. Losses are means over neighbours here, a twentieth of
    them on each side, so that noise doesn't decide; so the first rates, which lack
    neighbours, aren't suggested if others are there. Losses above the first ones count
    as these, and what comes after the lowest mean doesn't count.

    Args:
        rates: Ascending, evenly spaced in their logarithm.
        losses: A loss for each rate. What comes after the first that isn't finite is
            left out.

    Returns:
        One of the rates; None if the loss doesn't fall, or there are fewer than 5.

    Example:
        >>> steepest_descent([1e-4, 1e-3, 1e-2, 1e-1, 1.0], [2.0, 1.9, 1.0, 0.9, 5.0])
        0.001
        >>> steepest_descent([1e-4, 1e-3, 1e-2, 1e-1, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0])
    """
    count = next((i for i, x in enumerate(losses) if not math.isfinite(x)), len(losses))
    if count < _FEWEST:
        return None
    smooth = _smoothed(losses[:count])
    lowest = smooth.index(min(smooth))
    begin = 1 + count // _PART  # the rate before it has all of its neighbours
    if begin >= lowest:
        begin = 1
    # The slope at each rate, from the rate before it to the one after it.
    falls = [smooth[at - 1] - smooth[at + 1] for at in range(begin, lowest)]
    falls = falls or [smooth[0] - smooth[lowest]]
    return rates[begin + falls.index(max(falls))] if max(falls) > 0 else None


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Means over neighbours, without what is above the first ones."""
    reach = len(losses) // _PART
    first = sum(losses[: reach + 1]) / (reach + 1)
    clipped = [min(loss, first) for loss in losses]
    means = []
    for middle in range(len(clipped)):
        own = min(reach, middle, len(clipped) - 1 - middle)  # as many on each side
        near = clipped[middle - own : middle + own + 1]
        means.append(sum(near) / len(near))
    return means


class Divergence:
    """Notices that losses grow: their running mean is far above its lowest value.

    The mean is exponential, with the bias correction that Adam has (Kingma and Ba,
    2014, arXiv:1412.6980, section 3).

    Args:
        threshold: Multiple of the lowest mean from which on losses diverge; None to
            let them.

    Example:
        >>> divergence = Divergence(4.0)
        >>> [divergence.has_come(loss) for loss in (1.0, 0.5, 0.5, 30.0)]
        [False, False, False, True]
    """

    def __init__(self, threshold: float | None) -> None:
        self._threshold = threshold
        self._total = self._weight = 0.0
        self._lowest = math.inf

    def has_come(self, loss: float) -> bool:
        """Add a loss, and say whether losses diverge."""
        self._total = _SMOOTHING * self._total + (1 - _SMOOTHING) * loss
        self._weight = _SMOOTHING * self._weight + (1 - _SMOOTHING)
        mean = self._total / self._weight
        self._lowest = min(self._lowest, mean)
        if self._threshold is None:
            return False
        # A loss may be negative: a multiple of it would be lower.
        return mean - self._lowest > (self._threshold - 1) * abs(self._lowest)
