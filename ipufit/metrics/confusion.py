# SPDX-License-Identifier: Apache-2.0
"""Metrics from the confusion matrix: counts, precision, recall, F score, IoU."""

from __future__ import annotations

import abc
import functools
import math
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit._arguments import check_choice, check_integer, check_number, refuse
from ipufit._plots import Axes, Figure, axes_for, draw_confusion
from ipufit.errors import DataError

from .base import (
    AVERAGES,
    IGNORED_INDEX,
    Metric,
    bits,
    checked_flag,
    classified,
    flat,
    in_float32,
    is_of_bits,
    labels_last,
    one_hot,
    refuse_parts,
    score_above,
    total_marked,
    weighted,
)

_SUMMED = {None: (), "true": (1,), "pred": (0,), "all": (0, 1)}
"""Axes of a confusion matrix that sum to 1, by what `normalize` says."""


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

    With one output per sample, or a channel axis of size 1, the problem is binary. With
    scores of classes `[..., C]` the class of the highest score is predicted. Targets
    are then class indices or one-hot. With a binary loss, outputs `[N, C]` or
    `[N, C, ..., W]` are C binary problems, and `[N, H, W]` are a single problem.
    Targets of -100 are ignored.

    Args:
        threshold: The probability above which a 1 is predicted, above 0 and up to 1; or
            a list of them, for a value at each, `precision_0.3` and `precision_0.7`.
        from_logits: Whether binary outputs are logits, as in `BinaryAccuracy`.
        multi_label: Whether `[N, C]` or `[N, C, H, W]` are C problems of 0s and 1s.
        name: Key in logs.
        ignore_class: Targets that don't count, besides -100: 255 or -1 for pixels
            without a class; None for no others.
    """

    ignore_index = IGNORED_INDEX
    _value_of_nothing = math.nan
    _top_k: int | None = None

    def __init__(
        self,
        threshold: float | Sequence[float] = 0.5,
        from_logits: bool | None = None,
        multi_label: bool = False,
        name: str | None = None,
        ignore_class: int | None = None,
    ) -> None:
        super().__init__(name)
        self._thresholds: list[Any] = [threshold]
        if isinstance(threshold, (list, tuple)) and threshold:
            self._thresholds, self.has_parts = list(threshold), True
        for number in self._thresholds:
            check_number("threshold", number, above=0, most=1)
        self._from_logits = checked_flag("from_logits", from_logits)
        self._is_multi_label = checked_flag("multi_label", multi_label)
        self._ignored = [IGNORED_INDEX]
        if ignore_class is not None:
            check_number("ignore_class", ignore_class, is_whole=True)
            self._ignored.append(ignore_class)

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Count true and false positives, false and true negatives: `[4 * C]`.

        Those of each threshold follow one another.
        """
        sums = []
        for threshold in self._thresholds:
            predicted, true, counts = self._marked(outputs, targets, weights, threshold)
            rejected, false = predicted.logical_not(), true.logical_not()
            pairs = (
                (predicted, true),
                (predicted, false),
                (rejected, true),
                (rejected, false),
            )
            sums += [total_marked(a.logical_and(b), counts) for a, b in pairs]
        return torch.cat(sums)

    def _marked(
        self,
        outputs: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        threshold: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return predictions and targets, bools `[..., C]`, and their weights."""
        has_labels, is_set = self._has_labels, self._is_multi_label
        if is_set or is_of_bits(outputs, targets, has_binary_loss=has_labels):
            scores, truths, counts = (
                labels_last(part, has_labels=has_labels, is_set=is_set)
                for part in bits(outputs, targets, weights, ignored=self._ignored)
            )
            self._check_classes(scores.shape[-1], outputs.shape)
            marks = []
            if threshold is not None:
                marks.append(scores.gt(score_above(threshold, self._takes_logits)))
            if self._top_k is not None:
                marks.append(highest(scores, self._top_k))
            return functools.reduce(torch.logical_and, marks), truths.gt(0.5), counts
        scores, labels, counts = classified(outputs, targets, weights, self._ignored)
        self._check_classes(scores.shape[-1], outputs.shape)
        true = one_hot(labels, scores.shape[-1])
        best = (
            one_hot(scores.argmax(dim=-1), scores.shape[-1])
            if self._top_k is None
            else highest(scores, self._top_k)
        )
        return best, true, counts.unsqueeze(-1).expand(true.shape)

    def _check_classes(self, num_classes: int, shape: torch.Size) -> None:
        """Refuse outputs of a shape that doesn't fit the settings."""

    def result(self, sums: Tensor) -> Any:
        """Compute the metric's value from the counts; NaN without samples.

        Of several thresholds, or classes without an average, it is a dict of values.
        """
        refuse_parts(self.name, sums)
        values = [
            self._value(Counts(*table))
            for table in sums.reshape(len(self._thresholds), 4, -1)
        ]
        if len(values) == 1:
            return values[0]
        return dict(zip(map(str, self._thresholds), values))

    def _value(self, counts: Counts) -> Any:
        value = self._compute(counts)
        if float(torch.stack(counts).sum()):
            return value
        nothing = self._value_of_nothing
        return dict.fromkeys(value, nothing) if isinstance(value, dict) else nothing

    _compute: Callable[[Counts], Any]  # a value, or a dict of several


def both_classes(counts: Counts, *, has_labels: bool | None) -> Counts:
    """Return counts `[classes, labels]`; a binary problem has the classes 0 and 1.

    Example:
        >>> counts = Counts(*torch.tensor([[1.0], [2.0], [3.0], [9.0]]))
        >>> both_classes(counts, has_labels=False).tp
        tensor([[1.],
                [9.]])
    """
    if len(counts.tp) > 1 and not has_labels:
        return Counts(*(cell.unsqueeze(-1) for cell in counts))
    swapped = Counts(counts.tn, counts.fn, counts.fp, counts.tp)
    return Counts(*(torch.stack(cells) for cells in zip(counts, swapped)))


def mean_score(part: Tensor, whole: Tensor) -> float:
    """Return the mean score of the classes that occur, averaged over labels.

    Example:
        >>> mean_score(torch.tensor([[1.0], [0.0]]), torch.tensor([[2.0], [0.0]]))
        0.5
    """
    return float((ratio(part, whole).sum(0) / whole.gt(0).sum(0)).nanmean())


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


def highest(scores: Tensor, k: int) -> Tensor:
    """Mark the `k` highest scores along the last axis; of equal scores the earlier.

    Example:
        >>> highest(torch.tensor([0.5, 0.1, 0.9, 0.5]), 2)
        tensor([ True, False,  True, False])
    """
    lowest = scores.topk(k, dim=-1)[0][..., -1:]
    above, equal = scores.gt(lowest), scores.eq(lowest)
    left = above.to(torch.float32).sum(dim=-1, keepdim=True).neg().add(k)
    is_left = equal.to(torch.float32).cumsum(dim=-1).le(left)
    return above.logical_or(equal.logical_and(is_left))


class _Count(ConfusionMetric):
    """Base of counts over all classes, which have no `direction`."""

    _cell = "tp"
    _default_name = "true_positives"
    _value_of_nothing = 0.0

    def _compute(self, counts: Counts) -> float:
        cell: Tensor = getattr(counts, self._cell)
        return float(cell.sum())


class TruePositives(_Count):
    """The number of 1s predicted as 1; with classes, of correct samples."""


class FalsePositives(_Count):
    """The number of 0s predicted as 1; with classes, of wrong samples."""

    _cell = "fp"
    _default_name = "false_positives"


class TrueNegatives(_Count):
    """The number of 0s predicted as 0; with classes, summed over classes."""

    _cell = "tn"
    _default_name = "true_negatives"


class FalseNegatives(_Count):
    """The number of 1s predicted as 0; with classes, of wrong samples."""

    _cell = "fn"
    _default_name = "false_negatives"


class ClassScore(ConfusionMetric):
    """A score of each class and their average, as in scikit-learn.

    Args:
        threshold: The probability above which a 1 is predicted, or a list of them, as
            in `ConfusionMetric`; 0.5 by default, or none with `top_k`.
        average: Average over classes: `"macro"` is the mean, `"weighted"` the mean
            weighted by the number of targets of each class, `"micro"` the score of the
            summed counts. Classes that are neither targets nor predicted are left out.
            None for a value of each class, `f1_score_0`, `f1_score_1` and so on. Binary
            scores aren't averaged.
        from_logits: Whether binary outputs are logits, as in `BinaryAccuracy`.
        multi_label: Whether `[N, C]` or `[N, C, H, W]` are C problems of 0s and 1s.
        class_id: Index of the only class to score, instead of an average.
        name: Key in logs.
        ignore_class: Targets that don't count, besides -100: 255 or -1 for pixels
            without a class; None for no others.
        top_k: Number of classes of the highest scores that are predicted for a sample,
            instead of the highest; of several labels those above the threshold.
    """

    direction = "max"

    def __init__(
        self,
        threshold: float | Sequence[float] | None = None,
        average: str | None = "macro",
        from_logits: bool | None = None,
        multi_label: bool = False,
        class_id: int | None = None,
        name: str | None = None,
        ignore_class: int | None = None,
        top_k: int | None = None,
    ) -> None:
        least = 0.5 if threshold is None else threshold
        super().__init__(least, from_logits, multi_label, name, ignore_class)
        if class_id is not None:
            check_integer("class_id", class_id)
        check_choice("average", average, (*AVERAGES, None))
        if top_k is not None:
            check_integer("top_k", top_k, least=1)
            self._thresholds = [None] if threshold is None else self._thresholds
        self._average = average
        self._class_id = class_id
        self._top_k = top_k
        if average is None:  # a checkpoint describes all public attributes
            self.has_parts = True

    def _check_classes(self, num_classes: int, shape: torch.Size) -> None:
        for name, last in (("class_id", self._class_id), ("top_k", self._top_k)):
            if last is not None and last + (name == "class_id") > num_classes:
                raise DataError(
                    f"{type(self).__name__}({name}={last}) got outputs of "
                    f"shape {tuple(shape)}: scores of {num_classes} classes."
                )

    def _compute(self, counts: Counts) -> Any:
        if self._class_id is not None:
            return float(self._scores(counts)[self._class_id])
        if self._average == "micro":
            counts = Counts(*(cell.sum().reshape(1) for cell in counts))
        scores, true = self._scores(counts), counts.tp + counts.fn
        if len(scores) == 1:
            return float(scores)
        if self._average is None:
            return {str(index): score for index, score in enumerate(scores.tolist())}
        if self._average == "weighted":
            return float(ratio(scores.mul(true).sum(), true.sum()))
        present = self._present(counts)
        return float(ratio(scores.mul(present).sum(), present.sum()))

    def _present(self, counts: Counts) -> Tensor:
        """Return 1 for each class that the average includes, 0 for other classes.

        Classes without predictions and targets are left out; labels never are.
        """
        if self._has_labels:
            return torch.ones_like(counts.tp)
        return union(counts).gt(0).to(torch.float64)

    @abc.abstractmethod
    def _scores(self, counts: Counts) -> Tensor:
        """Compute the score of each class; 0 where the divisor is 0."""


class Precision(ClassScore):
    """The share of predicted 1s that are true, of each class. See `ClassScore`.

    Example:
        >>> metric = Precision()
        >>> sums = metric.sums(torch.tensor([1.0, 2.0, -1.0]), torch.tensor([1, 0, 1]))
        >>> metric.result(sums.double())
        0.5
    """

    _default_name = "precision"

    def _scores(self, counts: Counts) -> Tensor:
        return ratio(counts.tp, counts.tp + counts.fp)


class Recall(ClassScore):
    """The share of true 1s that are predicted, of each class. See `ClassScore`."""

    _default_name = "recall"

    def _scores(self, counts: Counts) -> Tensor:
        return ratio(counts.tp, counts.tp + counts.fn)


class Specificity(ClassScore):
    """The share of true 0s that are predicted, of each class. See `ClassScore`."""

    _default_name = "specificity"

    def _scores(self, counts: Counts) -> Tensor:
        return ratio(counts.tn, counts.tn + counts.fp)


class FBetaScore(ClassScore):
    """A mean of precision and recall, in which recall counts `beta` times as much.

    Args:
        average: `"macro"`, `"micro"`, `"weighted"` or None, as in `ClassScore`.
        beta: Weight of recall; 1 if it counts as much as precision.
        threshold: The probability above which a 1 is predicted.
        from_logits: Whether binary outputs are logits, as in `BinaryAccuracy`.
        multi_label: Whether `[N, C]` or `[N, C, H, W]` are C problems of 0s and 1s.
        class_id: Index of the only class to score, instead of an average.
        name: Key in logs.
        ignore_class: Targets that don't count, besides -100: 255 or -1 for pixels
            without a class; None for no others.
    """

    _default_name = "fbeta_score"

    def __init__(
        self,
        average: str | None = "macro",
        beta: float = 1.0,
        threshold: float | Sequence[float] = 0.5,
        from_logits: bool | None = None,
        multi_label: bool = False,
        class_id: int | None = None,
        name: str | None = None,
        ignore_class: int | None = None,
    ) -> None:
        labels = from_logits, multi_label, class_id
        super().__init__(threshold, average, *labels, name, ignore_class)
        check_number("beta", beta, above=0, most=1e6)
        self._square = float(beta) ** 2

    def _scores(self, counts: Counts) -> Tensor:
        right = counts.tp.mul(1 + self._square)
        return ratio(right, right + counts.fn.mul(self._square) + counts.fp)


class F1Score(FBetaScore):
    """The harmonic mean of precision and recall.

    Args:
        average: `"macro"`, `"micro"`, `"weighted"` or None, as in `ClassScore`.
        threshold: The probability above which a 1 is predicted.
        from_logits: Whether binary outputs are logits, as in `BinaryAccuracy`.
        multi_label: Whether `[N, C]` or `[N, C, H, W]` are C problems of 0s and 1s.
        class_id: Index of the only class to score, instead of an average.
        name: Key in logs.
        ignore_class: Targets that don't count, besides -100: 255 or -1 for pixels
            without a class; None for no others.

    Example:
        >>> metric = F1Score("micro")
        >>> sums = metric.sums(torch.eye(3), torch.tensor([0, 1, 1]))
        >>> round(metric.result(sums.double()), 4)
        0.6667
    """

    _default_name = "f1_score"

    def __init__(
        self,
        average: str | None = "macro",
        threshold: float | Sequence[float] = 0.5,
        from_logits: bool | None = None,
        multi_label: bool = False,
        class_id: int | None = None,
        name: str | None = None,
        ignore_class: int | None = None,
    ) -> None:
        labels = from_logits, multi_label, class_id
        super().__init__(average, 1.0, threshold, *labels, name, ignore_class)


class IoU(ClassScore):
    """The intersection over union of predictions and targets, of each class.

    In a binary problem it covers the 1s only. See `ClassScore`.
    """

    _default_name = "iou"

    def _scores(self, counts: Counts) -> Tensor:
        return ratio(counts.tp, union(counts))


class BalancedAccuracy(ConfusionMetric):
    """The recall of each class that occurs in targets, averaged.

    In a binary problem 0s are a class too. Several labels are averaged.

    Args:
        threshold: The probability above which a 1 is predicted.
        from_logits: Whether binary outputs are logits, as in `BinaryAccuracy`.
        name: Key in logs.
    """

    direction = "max"
    _default_name = "balanced_accuracy"

    def __init__(
        self,
        threshold: float = 0.5,
        from_logits: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(threshold, from_logits, name=name)

    def _compute(self, counts: Counts) -> float:
        counts = both_classes(counts, has_labels=self._has_labels)
        return mean_score(counts.tp, counts.tp + counts.fn)


class MeanIoU(ConfusionMetric):
    """The intersection over union of predictions and targets, averaged over classes.

    Classes that are neither targets nor predicted are left out. A binary problem has
    two classes. Several labels are averaged.

    Args:
        num_classes: Number of classes; None for the number of scores in the outputs.
        threshold: The probability above which a 1 is predicted.
        from_logits: Whether binary outputs are logits, as in `BinaryAccuracy`.
        name: Key in logs.
        ignore_class: Targets that don't count, besides -100: 255 or -1 for pixels
            without a class; None for no others.

    Example:
        >>> metric = MeanIoU(3)
        >>> sums = metric.sums(torch.eye(3), torch.tensor([0, 1, 1]))
        >>> metric.result(sums.double())
        0.5
    """

    direction = "max"
    _default_name = "mean_iou"

    def __init__(
        self,
        num_classes: int | None = None,
        threshold: float = 0.5,
        from_logits: bool | None = None,
        name: str | None = None,
        ignore_class: int | None = None,
    ) -> None:
        super().__init__(threshold, from_logits, False, name, ignore_class)
        if num_classes is not None:
            check_integer("num_classes", num_classes, least=2)
        self._num_classes = num_classes

    def _check_classes(self, num_classes: int, shape: torch.Size) -> None:
        num_scored = 2 if self._has_labels else max(2, num_classes)
        if self._num_classes not in (None, num_scored):
            raise DataError(
                f"MeanIoU(num_classes={self._num_classes}) got outputs of shape "
                f"{tuple(shape)}, which are scores of {num_scored} classes."
            )

    def _compute(self, counts: Counts) -> float:
        counts = both_classes(counts, has_labels=self._has_labels)
        return mean_score(counts.tp, union(counts))


class ConfusionMatrix(ConfusionMetric):
    """The weight of the samples of each pair of a true and a predicted class.

    Its value in logs is a list of rows: `matrix[i][j]` is of class i, predicted as j. A
    binary problem has the classes 0 and 1. The progress display and the loggers of
    single numbers leave it out. Of C classes, C * C numbers per micro-batch come to the
    host.

    Args:
        normalize: What sums to 1, as in scikit-learn: `"true"` each row, `"pred"` each
            column, `"all"` the matrix; None for counts, or sums of weights.
        threshold: The probability above which a 1 is predicted.
        from_logits: Whether binary outputs are logits, as in `BinaryAccuracy`.
        name: Key in logs.
        ignore_class: Targets that don't count, besides -100: 255 or -1 for pixels
            without a class; None for no others.

    Raises:
        ConfigError: An argument has another value.
        DataError: When a program is built, if the outputs are several labels that are
            each 0 or 1.

    Example:
        >>> metric = ConfusionMatrix()
        >>> sums = metric.sums(torch.eye(3), torch.tensor([0, 1, 1]))
        >>> metric.result(sums.double())
        [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    """

    is_matrix = True

    def __init__(
        self,
        normalize: str | None = None,
        threshold: float = 0.5,
        from_logits: bool | None = None,
        name: str | None = None,
        ignore_class: int | None = None,
    ) -> None:
        check_number("threshold", threshold, above=0, most=1)
        super().__init__(threshold, from_logits, False, name, ignore_class)
        check_choice("normalize", normalize, _SUMMED)
        self._normalize = normalize

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Sum the weights of each pair of classes: `[C * C]`."""
        marks = self._marked(outputs, targets, weights, self._thresholds[0])
        predicted, true, counts = marks
        if predicted.shape[-1] == 1:
            predicted, true = (
                torch.cat([is_one.logical_not(), is_one], dim=-1)
                for is_one in (predicted, true)
            )
        counts = counts[..., :1].expand(true.shape)
        rows = weighted(in_float32(true), counts).flatten(0, -2)
        return flat(rows.t().matmul(in_float32(predicted).flatten(0, -2)))

    def _check_classes(self, num_classes: int, shape: torch.Size) -> None:
        if num_classes > 1 and self._has_labels:
            raise DataError(
                f"ConfusionMatrix got outputs of shape {tuple(shape)}, which are "
                f"{num_classes} labels that are each 0 or 1: there is no matrix of all "
                "of them. Use the counts, such as FalsePositives()."
            )

    def result(self, sums: Tensor) -> Any:
        """Return the rows of the matrix; where there are no samples, 0."""
        refuse_parts(self.name, sums)
        size = math.isqrt(len(sums))
        matrix = sums.reshape(size, size)
        if self._normalize is not None:
            axes = _SUMMED[self._normalize]
            matrix = ratio(matrix, matrix.sum(axes, keepdim=True))
        return matrix.tolist()

    @staticmethod
    def plot(
        matrix: Sequence[Sequence[float]],
        labels: Sequence[Any] | None = None,
        *,
        axes: Axes | None = None,
    ) -> Figure:
        """Draw a matrix of logs, with matplotlib.

        Args:
            matrix: The metric's value in logs.
            labels: Names of the classes; None for their indices.
            axes: matplotlib's axes to draw in; by default new ones in a new figure of
                pyplot.

        Returns:
            The matplotlib figure that has the axes.

        Raises:
            ConfigError: matplotlib isn't installed, or an argument isn't one matrix or
                a name for each class.
        """
        shape, who = np.shape(matrix), "ConfusionMatrix.plot()"
        if len(shape) != 2 or len(set(shape)) != 1 or not len(matrix):
            refuse("matrix", matrix, "the matrix of one epoch", who)
        if labels is not None and len(labels) != len(matrix):
            refuse("labels", labels, f"{len(matrix)} names, one for each class", who)
        side = min(4.0 + 0.3 * len(matrix), 10.0)
        [part, *_] = axes_for(1, axes, who, (1.2 * side, side))
        draw_confusion(part, matrix, labels)
        return part.figure
