# SPDX-License-Identifier: Apache-2.0
"""Automatic loss scaling: as large as float16 gradients allow.

After each update the device looks at how many elements of its float16 gradients are
large. If the share of those above an edge is too high the scale is halved, otherwise
doubled (PopART, `lossscaleupdatex.cpp`, `sessionoptions.hpp`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ipufit.emulator._options.options import Options

UPDATE_FACTOR = "lossScaleUpdateFactor"
FINAL_LOSS_SCALE = "finalLossScale"

_PREFIX = "automaticLossScalingSettings."
_LARGEST_HALF = torch.finfo(torch.float16).max
_LARGEST_SCALE = 2.0**15


class AutomaticLossScale:
    """The factor by which a device multiplies the optimiser's loss scaling.

    The elements counted are those of the gradients that an update takes: accumulated
    and reduced. (PopART counts them before.) The scale never exceeds 2**15, the largest
    power of two that float16 holds.

    Args:
        bin_edge: Where large elements begin, as a share of the largest float16.
        largest_proportion: Share of large elements that is still good.
        period: Updates between two changes.

    Example:
        >>> scale = AutomaticLossScale(0.125, 1e-7, 1)
        >>> scale.adapt([torch.full((4,), 0.5)], loss_scaling=1.0)
        >>> scale.factor
        2.0
        >>> scale.adapt([torch.tensor([0.5, 9000.0])], loss_scaling=1.0)
        >>> scale.factor
        1.0
    """

    def __init__(self, bin_edge: float, largest_proportion: float, period: int) -> None:
        self._edge = bin_edge * _LARGEST_HALF
        self._largest_proportion = largest_proportion
        self._period = period
        self._updates = 0
        self.factor = 1.0

    @classmethod
    def from_options(cls, options: Options) -> AutomaticLossScale | None:
        """Read the settings off the options; None if they don't ask for it."""
        settings = options._Popart.options
        if not settings.get(f"{_PREFIX}enabled"):
            return None
        return cls(
            settings.get(f"{_PREFIX}binEdgeLocation", 0.125),
            settings.get(f"{_PREFIX}thresholdUpperCountProportion", 1e-7),
            settings.get(f"{_PREFIX}updatePeriod", 1),
        )

    def adapt(self, gradients: Iterable[Tensor], loss_scaling: float) -> None:
        """Count an update and change the factor if it is time.

        Args:
            gradients: Gradients of float16 weights, still scaled. Without any the
                factor stays: nothing says whether it is too high.
            loss_scaling: The optimiser's.
        """
        self._updates += 1
        num_large = num_elements = 0
        for gradient in gradients:
            is_small = gradient.abs() <= self._edge  # false for NaN
            num_large += int(is_small.numel() - is_small.sum())
            num_elements += gradient.numel()
        if not num_elements or self._updates % self._period:
            return
        if num_large > self._largest_proportion * num_elements:
            self.factor *= 0.5
        elif self.factor * loss_scaling * 2 <= _LARGEST_SCALE:
            self.factor *= 2.0
