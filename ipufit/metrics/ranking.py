# SPDX-License-Identifier: Apache-2.0
"""Areas under curves over thresholds: AUC and average precision."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor

from ipufit._arguments import check_choice, check_whole, refuse
from ipufit.errors import DataError

from .base import (
    AVERAGES,
    IGNORED_INDEX,
    CollectingMetric,
    Elements,
    Metric,
    bits,
    checked_flag,
    classified,
    dense_targets,
    has_class_axis,
    is_like,
    is_of_bits,
    labels_last,
    naming_targets,
    refuse_parts,
    total_marked,
    whole_rows,
)

CURVES = ("ROC", "PR")


class AUC(Metric):
    """The area under the curve of a binary problem, over evenly spaced thresholds.

    The counts at each threshold are summed, so the area covers all samples
    together. Scores between the same two thresholds count as equal. A sample has one
    output; or several outputs for several 0s and 1s, whose areas are averaged; or
    scores of two classes with a class index.

    Args:
        num_thresholds: Number of thresholds. More thresholds are more exact and take
            more memory.
        curve: `"ROC"`, the true over the false positive rate, linear between two
            thresholds; or `"PR"`, precision over recall, interpolated between them
            by counts, as in Davis & Goadrich, "The relationship between
            Precision-Recall and ROC curves" (2006).
        from_logits: Whether outputs are logits, as in `BinaryAccuracy`.
        name: Key in logs.
        average: Average over several labels: `"macro"` is the mean of their areas,
            `"weighted"` the mean weighted by the number of 1s, `"micro"` the area of
            all labels together.

    Example:
        >>> metric = AUC()
        >>> scores = torch.tensor([0.0, -1.0, 1.0, 2.0])
        >>> sums = metric.sums(scores, torch.tensor([0, 0, 1, 1]))
        >>> metric.result(sums.double())
        1.0
    """

    ignore_index = IGNORED_INDEX
    direction = "max"
    _default_name = "auc"

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        from_logits: bool | None = None,
        name: str | None = None,
        average: str = "macro",
    ) -> None:
        super().__init__(name)
        check_choice("average", average, AVERAGES)
        self._average = average
        check_whole("num_thresholds", num_thresholds, least=2, of="AUC")
        if not isinstance(curve, str) or curve.upper() not in CURVES:
            refuse("curve", curve, "'ROC' or 'PR'", of="AUC")
        # All scores are above the first threshold and none is above the last, so that
        # only those between are compared.
        self._num_steps = num_thresholds - 1
        self._is_roc = curve.upper() == "ROC"
        self._from_logits = checked_flag("from_logits", from_logits)

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return the weight of the 1s above each threshold, then that of the 0s."""
        parts = _split_labels(self, outputs, targets, weights)
        scores, truths, counts = (part.unsqueeze(-1) for part in parts)
        if self._takes_logits:
            scores = torch.sigmoid(scores)
        inner = torch.arange(
            1, self._num_steps, device=scores.device, dtype=torch.float32
        )
        above = scores.gt(inner.div(self._num_steps)).to(torch.float32)
        above = above.masked_fill(scores.isnan(), float("nan"))
        above = torch.cat([torch.ones_like(scores), above], dim=-1)
        spread, is_true = counts.expand(above.shape), truths.gt(0.5)
        marks = [above.mul(mark) for mark in (is_true, is_true.logical_not())]
        return torch.cat([total_marked(m.flatten(1), spread.flatten(1)) for m in marks])

    def result(self, sums: Tensor) -> float:
        """Compute the area; NaN without 0s, without 1s, or if scores are NaN."""
        tp, fp = (
            torch.cat([half, half.new_zeros(len(half), 1)], dim=1)
            for half in sums.reshape(2, -1, self._num_steps)
        )
        refuse_parts(self.name, tp[:, 0] + fp[:, 0])
        area = _roc if self._is_roc else _precision_recall
        return _average([area(*label) for label in zip(tp, fp)], tp, self._average)


class _Ranked(CollectingMetric):
    """Base of metrics of how scores rank 0s and 1s; it stores all scores.

    Args:
        name: Key in logs.
        average: Average over several labels, as in `AUC`.
    """

    ignore_index = IGNORED_INDEX
    direction = "max"

    def __init__(self, name: str | None = None, average: str = "macro") -> None:
        super().__init__(name)
        check_choice("average", average, AVERAGES)
        self._average = average

    def _rows(self, outputs: Any, targets: Any, weights: Tensor | None) -> list[Tensor]:
        with naming_targets(self.name):
            return _split_labels(self, outputs, targets, weights)

    def _figure(self, *rows: Tensor) -> float:
        """Compute the area; NaN if scores are NaN."""
        points = [_points(*label) for label in zip(*(part.unbind(1) for part in rows))]
        areas = [self._area(tp, fp) for tp, fp in points]
        return _average(areas, torch.stack([tp[:1] for tp, _ in points]), self._average)

    @abc.abstractmethod
    def _area(self, tp: Tensor, fp: Tensor) -> float:
        """Compute the area from the weights of 1s and 0s above each score."""


class ExactAUC(_Ranked):
    """The area under the ROC curve of all scores, as in scikit-learn.

    The training program must return all outputs for it; `AUC` needs a few sums instead.

    Args:
        name: Key in logs.
        average: Average over several labels, as in `AUC`.

    Example:
        >>> metric = ExactAUC()
        >>> metric.update(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 0]))
        >>> metric.result()
        0.5
    """

    _default_name = "exact_auc"

    def _area(self, tp: Tensor, fp: Tensor) -> float:
        return _roc(tp, fp)


class AveragePrecision(_Ranked):
    """The precision at each score, averaged over the 1s.

    It is scikit-learn's area under precision over recall, without interpolation. The
    training program must return all outputs for it. It is 0 without 1s.

    Args:
        name: Key in logs.
        average: Average over several labels, as in `AUC`.

    Example:
        >>> metric = AveragePrecision()
        >>> metric.update(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 0]))
        >>> metric.result()
        0.5
    """

    _default_name = "average_precision"

    def _area(self, tp: Tensor, fp: Tensor) -> float:
        if not float(tp[0]):
            return 0.0 if float(fp[0]) else float("nan")
        precision = tp[:-1] / (tp[:-1] + fp[:-1])
        return float(precision.mul(tp[:-1] - tp[1:]).sum() / tp[0])


def _binary(
    outputs: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    has_labels: bool | None,
    takes_logits: bool,
) -> Elements:
    """Reshape outputs to one score for each 0 or 1."""
    are_labels = is_of_bits(outputs, targets, has_binary_loss=has_labels)
    if is_like(outputs.shape, targets.shape):
        if are_labels or not has_class_axis(outputs, targets):
            return bits(outputs, targets, weights)
        parts = bits(*dense_targets(outputs, targets), weights)
        return parts if parts.outputs.dim() == 2 else _against_rest(parts)
    if outputs.dim() == 1 or 2 not in (outputs.shape[-1], outputs.shape[1]):
        return bits(outputs, targets, weights)
    scores, labels, counts = classified(outputs, targets, weights)
    if scores.shape[-1] != 2:
        raise DataError(
            f"Outputs of shape {tuple(outputs.shape)} are scores of "
            f"{scores.shape[-1]} classes, and the area under a curve needs two."
        )
    second = scores[..., 1]
    second = second.sub(scores[..., 0]) if takes_logits else second
    truths = labels.to(torch.float32)
    return Elements(*(part.reshape(-1) for part in (second, truths, counts)))


def _against_rest(parts: Elements) -> Elements:
    """Reshape scores `[..., C]` with one-hot targets to `[positions, C]`."""
    rows = whole_rows(parts.targets, parts.weights[..., 0])
    is_wrong = rows.isnan().unsqueeze(-1)
    checked = parts._replace(weights=parts.weights.masked_fill(is_wrong, float("nan")))
    return Elements(*(part.reshape(-1, part.shape[-1]) for part in checked))


def _split_labels(
    metric: AUC | _Ranked, outputs: Tensor, targets: Tensor, weights: Tensor | None
) -> list[Tensor]:
    """Return scores, targets and weights `[rows, labels]`; one label for "micro"."""
    has_labels, takes_logits = metric.has_binary_loss, metric._takes_logits
    parts = _binary(outputs, targets, weights, has_labels, takes_logits)
    if metric._average == "micro":
        return [part.reshape(-1, 1) for part in parts]
    columns = [labels_last(part, has_labels=has_labels) for part in parts]
    return [part.reshape(-1, part.shape[-1]) for part in columns]


def _points(scores: Tensor, truths: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of 1s and 0s from each score on; NaN if a score is NaN."""
    some = counts.ne(0)
    scores, is_true, counts = scores[some], truths[some].gt(0.5), counts[some].double()
    values, place = torch.unique(scores, return_inverse=True)  # lowest first
    counts = counts.masked_fill(scores.isnan().any(), float("nan"))
    tp, fp = (
        torch.zeros(len(values) + 1, dtype=torch.float64)
        .index_add_(0, place, torch.where(mark, counts, torch.zeros_like(counts)))
        .flip(0)
        .cumsum(0)
        .flip(0)
        for mark in (is_true, is_true.logical_not())
    )
    return tp, fp


def _average(areas: list[float], tp: Tensor, average: str) -> float:
    """Average the areas of labels; `tp` begins with the weight of all 1s."""
    means = torch.tensor(areas, dtype=torch.float64)
    shares = tp[:, 0] if average == "weighted" else torch.ones_like(means)
    return float(means.mul(shares).sum() / shares.sum())


def _roc(tp: Tensor, fp: Tensor) -> float:
    """Compute the area under straight lines between the points."""
    if not float(tp[0]) or not float(fp[0]):
        return float("nan")
    heights = (tp[:-1] + tp[1:]) / 2
    return float(heights.mul(fp[:-1] - fp[1:]).sum() / (tp[0] * fp[0]))


def _precision_recall(tp: Tensor, fp: Tensor) -> float:
    """Compute the area under `tp / (tp + fp)`; both are linear between points.

    With `tp = a + s * p` for `p = tp + fp` between two points, the integral of `tp / p`
    over `tp` is `s * (change of tp + a * log(ratio of p))`.
    """
    if not float(tp[0]) or not float(fp[0]):
        return float("nan")
    p = tp + fp
    rise, run = tp[:-1] - tp[1:], p[:-1] - p[1:]
    slope = torch.where(run > 0, rise / run, torch.zeros_like(run))
    offset = tp[1:] - slope * p[1:]
    ratio = torch.where(p[1:] > 0, p[:-1] / p[1:], torch.ones_like(p[1:]))
    return float((slope * (rise + offset * ratio.log())).sum() / tp[0])
