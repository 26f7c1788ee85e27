# SPDX-License-Identifier: Apache-2.0
"""Areas under curves over thresholds: AUC and average precision."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor

from ipufit.errors import ConfigError

from .base import (
    IGNORED_INDEX,
    CollectingMetric,
    Elements,
    Metric,
    bits,
    checked_flag,
    classified,
    has_class_axis,
    is_binary,
    is_whole,
    total_marked,
)

__all__ = ["AUC", "AveragePrecision", "ExactAUC"]

CURVES = ("ROC", "PR")


class AUC(Metric):
    """The area under the curve of a binary problem, over evenly spaced thresholds.

    The counts at each threshold are summed, so the area covers all samples
    together. Scores between the same two thresholds count as equal. A sample has one
    output; or several outputs for several 0s and 1s, which are pooled; or scores of two
    classes with a class index.

    Args:
        num_thresholds: Number of thresholds. More thresholds are more exact and take
            more memory.
        curve: `"ROC"`, the true over the false positive rate, linear between two
            thresholds; or `"PR"`, precision over recall, interpolated between them
            by counts, as in Davis & Goadrich, "The relationship between
            Precision-Recall and ROC curves" (2006).
        from_logits: Whether outputs are logits, as in `BinaryAccuracy`.
        name: Key in logs.

    Example:
        >>> metric = AUC()
        >>> scores = torch.tensor([0.0, -1.0, 1.0, 2.0])
        >>> sums = metric.sums(scores, torch.tensor([0, 0, 1, 1]))
        >>> metric.result(sums.double())
        1.0
    """

    ignore_index = IGNORED_INDEX
    direction = "max"

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        from_logits: bool | None = None,
        name: str = "auc",
    ) -> None:
        super().__init__(name)
        if not is_whole(num_thresholds, minimum=2):
            raise ConfigError(
                f"AUC(num_thresholds={num_thresholds!r}): use a whole number from 2."
            )
        if not isinstance(curve, str) or curve.upper() not in CURVES:
            raise ConfigError(f"AUC(curve={curve!r}): use 'ROC' or 'PR'.")
        # All scores are above the first threshold and none is above the last, so that
        # only those between are compared.
        self._num_steps = num_thresholds - 1
        self._is_roc = curve.upper() == "ROC"
        self._from_logits = checked_flag("from_logits", from_logits)

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return the weight of the 1s above each threshold, then that of the 0s."""
        scores, truths, counts = _binary(outputs, targets, weights)
        if self._takes_logits:
            scores = torch.sigmoid(scores)
        scores, truths, counts = (
            part.reshape(-1, 1) for part in (scores, truths, counts)
        )
        inner = torch.arange(
            1, self._num_steps, device=scores.device, dtype=torch.float32
        )
        above = scores.gt(inner.div(self._num_steps))
        above = torch.cat([torch.ones_like(scores).gt(0), above], dim=1)
        is_true = truths.gt(0.5)
        return torch.cat(
            [
                total_marked(above.logical_and(is_true), counts),
                total_marked(above.logical_and(is_true.logical_not()), counts),
            ]
        )

    def result(self, sums: Tensor) -> float:
        """Compute the area; NaN without 0s or without 1s."""
        tp, fp = (torch.cat([half, half.new_zeros(1)]) for half in sums.reshape(2, -1))
        if not float(tp[0]) or not float(fp[0]):
            return float("nan")
        return _roc(tp, fp) if self._is_roc else _precision_recall(tp, fp)


class _Ranked(CollectingMetric):
    """Base of metrics of how scores rank 0s and 1s; it stores all scores.

    Args:
        name: Key in logs.
    """

    ignore_index = IGNORED_INDEX
    direction = "max"

    def update(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> None:
        """Store the scores of a batch."""
        scores, truths, counts = _binary(outputs, targets, weights)
        kept = scores, truths.gt(0.5), counts
        self.batches.append([part.detach().reshape(-1) for part in kept])

    def _figure(self) -> float:
        """Compute the area; NaN without 0s, without 1s, or if scores are NaN."""
        scores, truths, counts = (torch.cat(part) for part in zip(*self.batches))
        some = counts.ne(0)
        scores, truths, counts = scores[some], truths[some], counts[some].double()
        values, place = torch.unique(scores, return_inverse=True)  # lowest first
        tp, fp = (
            torch.zeros(len(values) + 1, dtype=torch.float64)
            .index_add_(0, place, torch.where(mark, counts, torch.zeros_like(counts)))
            .flip(0)
            .cumsum(0)
            .flip(0)
            for mark in (truths, truths.logical_not())
        )
        if not float(tp[0]) or not float(fp[0]) or bool(torch.isnan(scores).any()):
            return float("nan")
        return self._area(tp, fp)

    @abc.abstractmethod
    def _area(self, tp: Tensor, fp: Tensor) -> float:
        """Compute the area from the weights of 1s and 0s above each score."""


class ExactAUC(_Ranked):
    """The area under the ROC curve of all scores, as in scikit-learn.

    The training program must return all outputs for it; `AUC` needs a few sums instead.

    Args:
        name: Key in logs.

    Example:
        >>> metric = ExactAUC()
        >>> metric.update(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 0]))
        >>> metric.result()
        0.5
    """

    def __init__(self, name: str = "exact_auc") -> None:
        super().__init__(name)

    def _area(self, tp: Tensor, fp: Tensor) -> float:
        return _roc(tp, fp)


class AveragePrecision(_Ranked):
    """The precision at each score, averaged over the 1s.

    It is scikit-learn's area under precision over recall, without interpolation. The
    training program must return all outputs for it.

    Args:
        name: Key in logs.

    Example:
        >>> metric = AveragePrecision()
        >>> metric.update(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 0]))
        >>> metric.result()
        0.5
    """

    def __init__(self, name: str = "average_precision") -> None:
        super().__init__(name)

    def _area(self, tp: Tensor, fp: Tensor) -> float:
        precision = tp[:-1] / (tp[:-1] + fp[:-1])
        return float(precision.mul(tp[:-1] - tp[1:]).sum() / tp[0])


def _binary(outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Elements:
    """Reshape outputs to one score for each 0 or 1."""
    is_pair = not is_binary(outputs) and outputs.shape[-1] == 2
    if is_pair and not has_class_axis(outputs, targets):
        scores, labels, counts = classified(outputs, targets, weights)
        margin = scores[..., 1].sub(scores[..., 0])
        return Elements(margin, labels.to(torch.float32), counts)
    return bits(outputs, targets, weights)


def _roc(tp: Tensor, fp: Tensor) -> float:
    """Compute the area under straight lines between the points."""
    heights = (tp[:-1] + tp[1:]) / 2
    return float(heights.mul(fp[:-1] - fp[1:]).sum() / (tp[0] * fp[0]))


def _precision_recall(tp: Tensor, fp: Tensor) -> float:
    """Compute the area under `tp / (tp + fp)`; both are linear between points.

    With `tp = a + s * p` for `p = tp + fp` between two points, the integral of `tp / p`
    over `tp` is `s * (change of tp + a * log(ratio of p))`.
    """
    p = tp + fp
    rise, run = tp[:-1] - tp[1:], p[:-1] - p[1:]
    slope = torch.where(run > 0, rise / run, torch.zeros_like(run))
    offset = tp[1:] - slope * p[1:]
    ratio = torch.where(p[1:] > 0, p[:-1] / p[1:], torch.ones_like(p[1:]))
    return float((slope * (rise + offset * ratio.log())).sum() / tp[0])
