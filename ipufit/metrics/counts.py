# SPDX-License-Identifier: Apache-2.0
"""The confusion matrix of each class, as sums."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base import Metric
from .settings import score_above
from .shapes import classified, elements, is_binary, one_hot, total_marked


class Counts(NamedTuple):
    """The confusion matrix of each class: weighted counts `[C]`, float64.

    Attributes:
        tp: True positives.
        fp: False positives.
        fn: False negatives.
        tn: True negatives.
    """

    tp: Tensor
    fp: Tensor
    fn: Tensor
    tn: Tensor


class ConfusionMetric(Metric):
    """Base of metrics that are functions of each class's confusion matrix.

    With one output per sample the problem is binary. With scores of classes `[..., C]`
    the class of the highest score is predicted. Targets are then class indices, of
    which -100 is ignored, or one-hot.

    Args:
        name: Key in logs.
        threshold: The probability above which a 1 is predicted.
        from_logits: Whether binary outputs are logits; else they are probabilities.
        multi_label: Whether the outputs `[..., C]` are C problems of 0s and 1s.
    """

    def __init__(
        self,
        name: str,
        threshold: float = 0.5,
        from_logits: bool = True,
        multi_label: bool = False,
    ) -> None:
        super().__init__(name)
        self._threshold = score_above(threshold, from_logits)
        self._is_multi_label = multi_label

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Count true and false positives, false and true negatives: `[4 * C]`."""
        predicted, true, counts = self._marked(outputs, targets, weights)
        self._check_classes(predicted.shape[-1], outputs.shape)
        rejected, false = predicted.logical_not(), true.logical_not()
        pairs = (
            (predicted, true),
            (predicted, false),
            (rejected, true),
            (rejected, false),
        )
        return torch.cat([total_marked(a.logical_and(b), counts) for a, b in pairs])

    def _marked(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return predictions and targets, bools `[..., C]`, and their weights."""
        if is_binary(outputs) or self._is_multi_label:
            scores, truths, counts = elements(outputs, targets, weights)
            predicted, true = scores.gt(self._threshold), truths.gt(0.5)
            if self._is_multi_label:
                return predicted, true, counts
            return predicted.reshape(-1, 1), true.reshape(-1, 1), counts.reshape(-1, 1)
        scores, labels, counts = classified(outputs, targets, weights)
        num_classes = scores.shape[-1]
        best = one_hot(scores.argmax(dim=-1), num_classes)
        spread = counts.unsqueeze(-1).expand(best.shape)
        return best, one_hot(labels, num_classes), spread

    def _check_classes(self, num_classes: int, shape: torch.Size) -> None:
        """Refuse outputs of a shape that doesn't fit the settings."""

    def result(self, sums: Tensor) -> float:
        """Compute the metric's value from the counts; NaN without samples."""
        if not float(sums.sum()):
            return float("nan")
        return self._figure(Counts(*sums.reshape(4, -1)))

    @abc.abstractmethod
    def _figure(self, counts: Counts) -> float:
        """Compute the metric's value from counts that aren't all 0."""


def both_classes(counts: Counts) -> Counts:
    """Add the 0s of a binary problem as a class; return other counts unchanged.

    Example:
        >>> both_classes(Counts(*torch.tensor([[1.0], [2.0], [3.0], [9.0]]))).tp
        tensor([1., 9.])
    """
    if len(counts.tp) > 1:
        return counts
    swapped = Counts(counts.tn, counts.fn, counts.fp, counts.tp)
    return Counts(*(torch.cat(cells) for cells in zip(counts, swapped)))


def union(counts: Counts) -> Tensor:
    """Return the weight of samples whose prediction or target is the class, by class.

    Example:
        >>> union(Counts(*torch.tensor([[1.0], [2.0], [3.0], [9.0]])))
        tensor([6.])
    """
    return torch.add(torch.add(counts.tp, counts.fp), counts.fn)


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Divide `part` by `whole`; 0 where `whole` is 0.

    Example:
        >>> ratio(torch.tensor([1.0, 0.0]), torch.tensor([4.0, 0.0]))
        tensor([0.2500, 0.0000])
    """
    return torch.where(whole.gt(0), part.div(whole), torch.zeros_like(part))
