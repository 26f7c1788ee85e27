# SPDX-License-Identifier: Apache-2.0
"""Accuracies: the share of samples that are classified correctly; and hinge losses."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from ipufit._arguments import check_integer, check_number

from .base import (
    IGNORED_INDEX,
    MeanMetric,
    Weighted,
    Weights,
    bits,
    checked_flag,
    class_indices,
    classified,
    dense_targets,
    flat,
    in_float32,
    is_of_bits,
    matched_targets,
    one_hot,
    score_above,
    weighted,
    zeros_like,
)


class _Share(MeanMetric):
    """Base of accuracies: the weighted share of correct samples."""

    direction = "max"
    ignore_index = IGNORED_INDEX

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return the weight of the correct samples, and of all samples."""
        is_right, counts = map(flat, self._values(outputs, targets, weights))
        # Two sums in few operations: a program runs them for every micro-batch.
        pair = [is_right.to(torch.float32).mul(counts), counts]
        return torch.stack(pair).sum(dim=1)

    def _highest_is_target(
        self, outputs: Tensor, targets: Tensor, weights: Weights
    ) -> Weighted:
        """Return whether each sample's highest score belongs to its target class."""
        scores, labels, counts = classified(outputs, targets, weights)
        return scores.argmax(dim=-1).eq(labels), counts


class BinaryAccuracy(_Share):
    """The share of 0s and 1s that are predicted correctly.

    Args:
        threshold: The probability above which a 1 is predicted.
        from_logits: Whether outputs are logits; else they are probabilities. None to
            decide by the model's trace and its loss; logits if both leave it open.
        name: Key in logs.

    Example:
        >>> metric = BinaryAccuracy()
        >>> metric.sums(torch.tensor([-2.0, 3.0]), torch.tensor([0, 0]))
        tensor([1., 2.])
    """

    _default_name = "binary_accuracy"

    def __init__(
        self,
        threshold: float = 0.5,
        from_logits: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        check_number("threshold", threshold, above=0, below=1)
        self._threshold = threshold
        self._from_logits = checked_flag("from_logits", from_logits)

    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        scores, truths, counts = bits(outputs, targets, weights)
        least = score_above(self._threshold, self._takes_logits)
        return scores.gt(least).eq(truths.gt(0.5)), counts


class CategoricalAccuracy(_Share):
    """The share of samples whose highest score is for the class of the one-hot target.

    Args:
        name: Key in logs.

    Example:
        >>> CategoricalAccuracy().sums(torch.eye(2), torch.eye(2))
        tensor([2., 2.])
    """

    _default_name = "categorical_accuracy"

    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        return self._highest_is_target(*dense_targets(outputs, targets), weights)


class SparseCategoricalAccuracy(_Share):
    """The share of samples whose class of highest score is the target.

    Targets are class indices; targets of -100 are ignored.

    Args:
        name: Key in logs.

    Example:
        >>> metric = SparseCategoricalAccuracy()
        >>> metric.sums(torch.eye(3), torch.tensor([0, 1, 1]))
        tensor([2., 3.])
    """

    _default_name = "sparse_categorical_accuracy"

    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        return self._highest_is_target(
            outputs, class_indices(outputs, targets), weights
        )


class Accuracy(BinaryAccuracy):
    """Binary, categorical or sparse accuracy, chosen by the shapes.

    The rule is Keras's for `"accuracy"`: one output per sample is binary; targets
    without the class axis are class indices; else they are one-hot. Outputs with a
    binary loss, or with a channel axis of size 1, are binary too.

    Args:
        from_logits: Whether binary outputs are logits, as in `BinaryAccuracy`.
        name: Key in logs.

    Example:
        >>> scores = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
        >>> Accuracy().sums(scores, torch.tensor([1, 1]))
        tensor([1., 2.])
    """

    _default_name = "accuracy"

    def __init__(
        self, from_logits: bool | None = None, name: str | None = None
    ) -> None:
        super().__init__(from_logits=from_logits, name=name)

    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        if is_of_bits(outputs, targets, has_binary_loss=self.has_binary_loss):
            return super()._values(outputs, targets, weights)
        return self._highest_is_target(outputs, targets, weights)


class TopKAccuracy(_Share):
    """The share of samples whose class is among the `k` highest scores.

    If scores are equal, the earlier class counts as higher. NaN counts as the highest.

    Args:
        k: Number of scores.
        name: Key in logs.

    Example:
        >>> scores = torch.tensor([[0.5, 0.4, 0.1], [0.5, 0.4, 0.1]])
        >>> TopKAccuracy(2).sums(scores, torch.tensor([1, 2]))
        tensor([1., 2.])
    """

    def __init__(self, k: int = 5, name: str | None = None) -> None:
        check_integer("k", k, least=1, of=type(self).__name__)
        default_name = self._default_name or f"top_{k}_accuracy"
        super().__init__(default_name if name is None else name)
        self._k = k

    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        scores, labels, counts = classified(outputs, targets, weights)
        is_target = one_hot(labels, scores.shape[-1])
        target = torch.where(is_target, scores, zeros_like(scores)).sum(-1, True)
        is_earlier = is_target.to(torch.float32).cumsum(dim=-1).eq(0)
        ahead = scores.le(target).logical_not()
        ahead = ahead.logical_or(scores.eq(target).logical_and(is_earlier))
        is_right = ahead.to(torch.float32).sum(dim=-1).lt(self._k)
        return is_right, counts


class TopKCategoricalAccuracy(TopKAccuracy):
    """`TopKAccuracy` of one-hot targets.

    Args:
        k: Number of scores.
        name: Key in logs.
    """

    _default_name = "top_k_categorical_accuracy"

    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        return super()._values(*dense_targets(outputs, targets), weights)


class SparseTopKCategoricalAccuracy(TopKAccuracy):
    """`TopKAccuracy` of class indices.

    Args:
        k: Number of scores.
        name: Key in logs.
    """

    _default_name = "sparse_top_k_categorical_accuracy"

    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        return super()._values(outputs, class_indices(outputs, targets), weights)


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
    return (1.0 - side * outputs.to(torch.float32)).clamp(min=0.0)


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


def categorical_hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return `max(0, 1 + highest other score - score of the target's class)`.

    Args:
        outputs: Scores of classes `[..., C]`.
        targets: One-hot `[..., C]`.

    Returns:
        One value per sample. As in Keras, the highest other score is 0 or more.

    Example:
        >>> categorical_hinge(torch.tensor([[0.25, -2.0]]), torch.tensor([[1, 0]]))
        tensor([0.7500])
    """
    scores, dense = dense_targets(outputs, targets)
    scores = in_float32(scores)
    others = weighted(scores, 1.0 - dense).max(dim=-1)[0]
    return (1.0 + others - weighted(scores, dense).sum(dim=-1)).clamp(min=0.0)


class Hinge(MeanMetric):
    """The mean of the hinge losses of 0s and 1s, or of -1s and 1s.

    Args:
        name: Key in logs.
        function: The loss of each output.

    Example:
        >>> Hinge().sums(torch.tensor([0.5, 0.5]), torch.tensor([1, 0]))
        tensor([2., 2.])
    """

    ignore_index = IGNORED_INDEX
    _default_name = "hinge"

    def __init__(
        self,
        name: str | None = None,
        function: Callable[[Tensor, Tensor], Tensor] = hinge,
    ) -> None:
        super().__init__(name)
        self._function = function

    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        counts = bits(outputs, targets, weights).weights
        return self._function(outputs, targets), counts


class CategoricalHinge(MeanMetric):
    """The mean of `max(0, 1 + highest other score - score of the target's class)`.

    As in Keras, the highest other score is 0 if all other scores are negative. In the
    loss of Crammer and Singer, which scikit-learn has, it is negative.

    Args:
        name: Key in logs.

    Example:
        >>> metric = CategoricalHinge()
        >>> metric.sums(torch.tensor([[0.25, 0.5]]), torch.tensor([0]))
        tensor([1.2500, 1.0000])
    """

    ignore_index = IGNORED_INDEX
    _default_name = "categorical_hinge"

    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        scores, labels, counts = classified(outputs, targets, weights)
        return categorical_hinge(scores, one_hot(labels, scores.shape[-1])), counts
