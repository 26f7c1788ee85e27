# SPDX-License-Identifier: Apache-2.0
"""Hinge losses: how far scores miss a margin of 1."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .base import Metric, mean_sums
from .shapes import classified, matched_targets, one_hot

__all__ = ["CategoricalHinge"]


def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the hinge loss of each output, `max(0, 1 - target * output)`.

    Args:
        outputs: Numbers of any shape, `[N]` or `[N, 1]` as a rule.
        targets: -1 and 1, or 0 and 1, where 0 stands for -1.

    Returns:
        Tensor of the outputs' shape, of numbers from 0.

    Example:
        >>> hinge(torch.tensor([0.5, 0.5]), torch.tensor([1, 0]))
        tensor([0.5000, 1.5000])
    """
    side = matched_targets(outputs, targets).gt(0.0).to(torch.float32) * 2.0 - 1.0
    values: Tensor = (1.0 - side * outputs.to(torch.float32)).clamp(min=0.0)
    return values


def squared_hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the square of `hinge`.

    Args:
        outputs: Numbers of any shape.
        targets: -1 and 1, or 0 and 1.

    Example:
        >>> squared_hinge(torch.tensor([0.5]), torch.tensor([-1]))
        tensor([2.2500])
    """
    return torch.square(hinge(outputs, targets))


class CategoricalHinge(Metric):
    """The mean of `max(0, 1 + highest other score - score of the target's class)`.

    It is Crammer and Singer's, as in scikit-learn. Keras takes 0 for the highest other
    score if all other scores are negative.

    Args:
        name: Key in logs.

    Example:
        >>> metric = CategoricalHinge()
        >>> metric.sums(torch.tensor([[0.0, -0.5]]), torch.tensor([0]))
        tensor([0.5000, 1.0000])
    """

    direction = "min"

    def __init__(self, name: str = "categorical_hinge") -> None:
        super().__init__(name)

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return the sum of the losses, and the weight of the samples that count."""
        scores, labels, counts = classified(outputs, targets, weights)
        is_own = one_hot(labels, scores.shape[-1])
        own = scores.masked_fill(is_own.logical_not(), 0.0).sum(dim=-1)
        others = scores.masked_fill(is_own, -math.inf).amax(dim=-1)
        return mean_sums((1.0 + others - own).clamp(min=0.0), counts)
