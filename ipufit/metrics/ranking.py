# SPDX-License-Identifier: Apache-2.0
"""Curves over thresholds: areas under them, and the best point of a least height."""

from __future__ import annotations

import abc
import math
from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from ipufit._arguments import check_choice, check_integer, check_number, refuse
from ipufit.errors import ConfigError, DataError

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
from .confusion import ratio

CURVES = ("ROC", "PR")
_HEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "interpolation": lambda left, right: (left + right) / 2,
    "minoring": torch.minimum,
    "majoring": torch.maximum,
}
"""Height of a curve between two points, by the name of the summation method."""


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
        summation_method: Height of the curve between two thresholds: `"minoring"` the
            lower of both, `"majoring"` the higher; `"interpolation"` as `curve` says.
        thresholds: Probabilities between the first threshold and the last, in place of
            `num_thresholds`.
        multi_label: Whether `[N, C]` or `[N, C, H, W]` are C problems of 0s and 1s.
        label_weights: Weight of each label in the mean of areas, or with `"micro"` in
            the counts.

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
    _first = 1
    _class_id: int | None = None

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        from_logits: bool | None = None,
        name: str | None = None,
        average: str = "macro",
        summation_method: str = "interpolation",
        thresholds: Sequence[float] | None = None,
        multi_label: bool = False,
        label_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(name)
        check_choice("average", average, AVERAGES)
        self._average = average
        if not isinstance(curve, str) or curve.upper() not in CURVES:
            refuse("curve", curve, "'ROC' or 'PR'", of="AUC")
        check_choice("summation_method", summation_method, _HEIGHTS, of="AUC")
        self._method = summation_method
        # All scores are above the first threshold and none is above the last, so that
        # only those between are compared.
        kind = type(self).__name__
        check_integer("num_thresholds", num_thresholds, least=2, of=kind)
        self._num_steps = num_thresholds - 1
        lists = {"thresholds": thresholds, "label_weights": label_weights}
        for label, values in lists.items():
            if values is not None and (
                not isinstance(values, (list, tuple)) or not values
            ):
                refuse(label, values, "a list of numbers", of="AUC")
        for threshold in thresholds or ():
            check_number("a threshold", threshold, least=0, most=1, of="AUC")
        self._thresholds = None if thresholds is None else sorted(thresholds)
        self._is_roc = curve.upper() == "ROC"
        self._from_logits = checked_flag("from_logits", from_logits)
        self._is_multi_label = checked_flag("multi_label", multi_label)
        self._label_weights = label_weights
        for weight in label_weights or ():
            check_number("a label's weight", weight, least=0, of="AUC")
        if average == "weighted" and label_weights is not None:
            raise ConfigError(
                "AUC got average='weighted', which weighs each label by its number of "
                f"1s, and label_weights={label_weights}. Give one of them."
            )

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return the weight of the 1s above each threshold, then that of the 0s."""
        parts = _split_labels(self, outputs, targets, weights)
        scores, truths, counts = (part.unsqueeze(-1) for part in parts)
        if self._takes_logits:
            scores = torch.sigmoid(scores)
        above = self._above(scores).to(torch.float32)
        above = above.masked_fill(scores.isnan(), float("nan"))
        above = torch.cat([torch.ones_like(scores), above], dim=-1)
        spread, is_true = counts.expand(above.shape), truths.gt(0.5)
        marks = [above.mul(mark) for mark in (is_true, is_true.logical_not())]
        return torch.cat([total_marked(m.flatten(1), spread.flatten(1)) for m in marks])

    def _above(self, scores: Tensor) -> Tensor:
        """Return whether scores `[..., 1]` are above each inner threshold."""
        if self._thresholds is not None:
            return torch.cat([scores.gt(t) for t in self._thresholds], dim=-1)
        steps = torch.arange(
            self._first, self._num_steps, device=scores.device, dtype=torch.float32
        )
        return scores.gt(steps.div(self._num_steps))

    def result(self, sums: Tensor) -> float:
        """Compute the area; NaN if no target is 0, none is 1, or a score is NaN."""
        num_inner = self._num_steps - self._first
        if self._thresholds is not None:
            num_inner = len(self._thresholds)
        tp, fp = (
            torch.cat([half, half.new_zeros(len(half), 1)], dim=1)
            for half in sums.reshape(2, -1, 1 + num_inner)
        )
        refuse_parts(self.name, tp[:, 0] + fp[:, 0])
        areas = [self._compute(*label) for label in zip(tp, fp)]
        if self._label_weights is None or self._average == "micro":
            return _average(areas, tp, self._average)
        label_weights = torch.tensor(self._label_weights, dtype=torch.float64)
        return _average(areas, label_weights.unsqueeze(1), "weighted")

    def _compute(self, tp: Tensor, fp: Tensor) -> float:
        """Compute the area from the weights of 1s and 0s above each threshold."""
        if self._is_roc:
            return _roc(tp, fp, self._method)
        if not _has_both(tp, fp):
            return math.nan
        if self._method == "interpolation":
            return _precision_recall(tp, fp)
        return float(_riemann(tp, ratio(tp, tp + fp), self._method) / tp[0])


class _Best(AUC):
    """Base of the best rate among the thresholds at which another is high enough."""

    _first = 0  # as in Keras, a probability of 0 is above no threshold
    _limited = _best = "recall"

    def __init__(
        self,
        least: float,
        num_thresholds: int,
        class_id: int | None,
        name: str | None,
        from_logits: bool | None,
        average: str,
        multi_label: bool,
    ) -> None:
        check_number(self._limited, least, of=type(self).__name__, least=0, most=1)
        if class_id is not None:
            check_integer("class_id", class_id)
        super().__init__(
            num_thresholds,
            from_logits=from_logits,
            name=name,
            average=average,
            multi_label=multi_label,
        )
        self._least = least
        self._class_id = class_id

    def _compute(self, tp: Tensor, fp: Tensor) -> float:
        if not _has_both(tp, fp):
            return math.nan
        above = tp[1:], fp[1:]
        rates = {
            "recall": above[0] / tp[0],
            "specificity": 1 - above[1] / fp[0],
            "precision": ratio(above[0], above[0] + above[1]),
        }
        rates["sensitivity"] = rates["recall"]
        is_enough = rates[self._limited].ge(self._least)
        return float(rates[self._best].mul(is_enough).max())


class PrecisionAtRecall(_Best):
    """The highest precision among the thresholds at which recall is high enough.

    It is 0 if there is no such threshold, and NaN without 0s or without 1s. Several
    labels are averaged.

    Args:
        recall: The lowest recall that is high enough, from 0 to 1.
        num_thresholds: Number of evenly spaced thresholds, as in `AUC`.
        class_id: Index of the only label, instead of an average.
        name: Key in logs.
        from_logits: Whether outputs are logits, as in `BinaryAccuracy`.
        average: Average over several labels, as in `AUC`.
        multi_label: Whether `[N, C]` or `[N, C, H, W]` are C problems of 0s and 1s.

    Example:
        >>> metric = PrecisionAtRecall(0.5)
        >>> scores = torch.tensor([-2.0, -1.0, 1.0, 2.0])
        >>> sums = metric.sums(scores, torch.tensor([0, 1, 0, 1]))
        >>> metric.result(sums.double())
        1.0
    """

    _default_name = "precision_at_recall"
    _best, _limited = "precision", "recall"

    def __init__(
        self,
        recall: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        from_logits: bool | None = None,
        average: str = "macro",
        multi_label: bool = False,
    ) -> None:
        settings = num_thresholds, class_id, name, from_logits, average, multi_label
        super().__init__(recall, *settings)


class RecallAtPrecision(_Best):
    """The highest recall among the thresholds at which precision is high enough.

    It is 0 if there is no such threshold, and NaN without 0s or without 1s. Several
    labels are averaged.

    Args:
        precision: The lowest precision that is high enough, from 0 to 1.
        num_thresholds: Number of evenly spaced thresholds, as in `AUC`.
        class_id: Index of the only label, instead of an average.
        name: Key in logs.
        from_logits: Whether outputs are logits, as in `BinaryAccuracy`.
        average: Average over several labels, as in `AUC`.
        multi_label: Whether `[N, C]` or `[N, C, H, W]` are C problems of 0s and 1s.
    """

    _default_name = "recall_at_precision"
    _best, _limited = "recall", "precision"

    def __init__(
        self,
        precision: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        from_logits: bool | None = None,
        average: str = "macro",
        multi_label: bool = False,
    ) -> None:
        settings = num_thresholds, class_id, name, from_logits, average, multi_label
        super().__init__(precision, *settings)


class SensitivityAtSpecificity(_Best):
    """The highest sensitivity among the thresholds at which specificity is high enough.

    It is 0 if there is no such threshold, and NaN without 0s or without 1s. Several
    labels are averaged.

    Args:
        specificity: The lowest specificity that is high enough, from 0 to 1.
        num_thresholds: Number of evenly spaced thresholds, as in `AUC`.
        class_id: Index of the only label, instead of an average.
        name: Key in logs.
        from_logits: Whether outputs are logits, as in `BinaryAccuracy`.
        average: Average over several labels, as in `AUC`.
        multi_label: Whether `[N, C]` or `[N, C, H, W]` are C problems of 0s and 1s.
    """

    _default_name = "sensitivity_at_specificity"
    _best, _limited = "sensitivity", "specificity"

    def __init__(
        self,
        specificity: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        from_logits: bool | None = None,
        average: str = "macro",
        multi_label: bool = False,
    ) -> None:
        settings = num_thresholds, class_id, name, from_logits, average, multi_label
        super().__init__(specificity, *settings)


class SpecificityAtSensitivity(_Best):
    """The highest specificity among the thresholds at which sensitivity is high enough.

    It is 0 if there is no such threshold, and NaN without 0s or without 1s. Several
    labels are averaged.

    Args:
        sensitivity: The lowest sensitivity that is high enough, from 0 to 1.
        num_thresholds: Number of evenly spaced thresholds, as in `AUC`.
        class_id: Index of the only label, instead of an average.
        name: Key in logs.
        from_logits: Whether outputs are logits, as in `BinaryAccuracy`.
        average: Average over several labels, as in `AUC`.
        multi_label: Whether `[N, C]` or `[N, C, H, W]` are C problems of 0s and 1s.
    """

    _default_name = "specificity_at_sensitivity"
    _best, _limited = "specificity", "sensitivity"

    def __init__(
        self,
        sensitivity: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        from_logits: bool | None = None,
        average: str = "macro",
        multi_label: bool = False,
    ) -> None:
        settings = num_thresholds, class_id, name, from_logits, average, multi_label
        super().__init__(sensitivity, *settings)


class _Ranked(CollectingMetric):
    """Base of metrics of how scores rank 0s and 1s; it stores all scores.

    Args:
        name: Key in logs.
        average: Average over several labels, as in `AUC`.
        multi_label: Whether `[N, C]` or `[N, C, H, W]` are C problems of 0s and 1s.
    """

    ignore_index = IGNORED_INDEX
    direction = "max"
    _class_id = _label_weights = None

    def __init__(
        self,
        name: str | None = None,
        average: str = "macro",
        multi_label: bool = False,
    ) -> None:
        super().__init__(name)
        check_choice("average", average, AVERAGES)
        self._average = average
        self._is_multi_label = checked_flag("multi_label", multi_label)

    def _rows(self, outputs: Any, targets: Any, weights: Tensor | None) -> list[Tensor]:
        with naming_targets(self.name):
            return _split_labels(self, outputs, targets, weights)

    def _compute(self, *rows: Tensor) -> float:
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
        multi_label: Whether `[N, C]` or `[N, C, H, W]` are C problems of 0s and 1s.

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
        multi_label: Whether `[N, C]` or `[N, C, H, W]` are C problems of 0s and 1s.

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
    has_labels, is_set = metric._has_labels, metric._is_multi_label
    parts = _binary(outputs, targets, weights, has_labels, metric._takes_logits)
    index, label_weights = metric._class_id, metric._label_weights
    is_micro = metric._average == "micro"
    if is_micro and index is None and label_weights is None:
        return [part.reshape(-1, 1) for part in parts]
    columns = [labels_last(p, has_labels=has_labels, is_set=is_set) for p in parts]
    columns = [part.reshape(-1, part.shape[-1]) for part in columns]
    num_labels = columns[0].shape[-1]
    num_weights = num_labels if label_weights is None else len(label_weights)
    if num_weights != num_labels or (index or 0) >= num_labels:
        setting = f"class_id={index}" if index else f"label_weights={label_weights}"
        raise DataError(
            f"{type(metric).__name__}({setting}) got outputs of shape "
            f"{tuple(outputs.shape)}: scores of {num_labels} labels."
        )
    if index is not None:
        return [part[:, index : index + 1] for part in columns]
    if not is_micro or label_weights is None:
        return columns
    weighed = [c * weight for c, weight in zip(columns[2].unbind(1), label_weights)]
    columns[2] = torch.stack(weighed, dim=1)
    return [part.reshape(-1, 1) for part in columns]


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
    """Average the areas of labels; `tp` begins with the weights for `"weighted"`."""
    means = torch.tensor(areas, dtype=torch.float64)
    shares = tp[:, 0] if average == "weighted" else torch.ones_like(means)
    return float(means.mul(shares).sum() / shares.sum())


def _has_both(tp: Tensor, fp: Tensor) -> bool:
    return bool(float(tp[0]) and float(fp[0]))


def _riemann(x: Tensor, y: Tensor, method: str) -> Tensor:
    """Sum the rectangles under a curve whose `x` falls."""
    return _HEIGHTS[method](y[:-1], y[1:]).mul(x[:-1] - x[1:]).sum()


def _roc(tp: Tensor, fp: Tensor, method: str = "interpolation") -> float:
    """Compute the area under straight lines between the points."""
    if not _has_both(tp, fp):
        return math.nan
    return float(_riemann(fp, tp, method) / (tp[0] * fp[0]))


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
