# SPDX-License-Identifier: Apache-2.0
"""Accuracies: the share of samples that are classified right."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor

from ipufit.errors import ConfigError

from .base import Metric, flat, in_float32, mean_sums, spread_weights, zeros_like
from .shapes import (
    IGNORED_INDEX,
    class_indices,
    classified,
    dense_targets,
    has_class_axis,
    is_binary,
    matched_targets,
    one_hot,
)
from .thresholds import checked_threshold, score_at


class _Share(Metric):
    """The weighted share of samples that are right."""

    direction = "max"

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Weight of what is right, and of all."""
        is_right, counts = self._judged(outputs, targets, weights)
        if counts is not None and counts.dtype == torch.bool:
            # Two sums in few operations: a program runs them for every micro-batch.
            pair = torch.stack([flat(is_right), flat(counts)])
            sums: Tensor = pair.to(torch.float32).sum(dim=1)
            return sums
        return mean_sums(is_right, counts)

    @abc.abstractmethod
    def _judged(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Right or wrong, and how much each counts.

        None if all count alike; whether they count, if what doesn't is never right.
        """


class BinaryAccuracy(_Share):
    """The share of 0s and 1s that are found.

    Args:
        threshold: The probability above which a 1 is predicted.
        from_logits: Whether outputs are logits; else they are probabilities.
        name: Its key in logs.

    Example:
        >>> metric = BinaryAccuracy()
        >>> metric.sums(torch.tensor([-2.0, 3.0]), torch.tensor([0, 0]))
        tensor([1., 2.])
    """

    def __init__(
        self,
        threshold: float = 0.5,
        from_logits: bool = True,
        name: str = "binary_accuracy",
    ) -> None:
        super().__init__(name)
        self._threshold = score_at(checked_threshold(threshold), from_logits)

    def _judged(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        scores, truths = in_float32(outputs), matched_targets(outputs, targets)
        counts = None if weights is None else spread_weights(weights, truths)
        return scores.gt(self._threshold).eq(truths.gt(0.5)), counts


class CategoricalAccuracy(_Share):
    """The share of samples whose highest score is that of the one-hot target.

    Args:
        name: Its key in logs.

    Example:
        >>> CategoricalAccuracy().sums(torch.eye(2), torch.eye(2))
        tensor([2., 2.])
    """

    def __init__(self, name: str = "categorical_accuracy") -> None:
        super().__init__(name)

    def _judged(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return _best(outputs, dense_targets(outputs, targets), weights)


class SparseCategoricalAccuracy(_Share):
    """The share of samples whose highest score is that of the target's index.

    Targets of -100 don't count.

    Args:
        name: Its key in logs.

    Example:
        >>> metric = SparseCategoricalAccuracy()
        >>> metric.sums(torch.eye(3), torch.tensor([0, 1, 1]))
        tensor([2., 3.])
    """

    def __init__(self, name: str = "sparse_categorical_accuracy") -> None:
        super().__init__(name)

    def _judged(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return _best(outputs, class_indices(outputs, targets), weights)


class Accuracy(_Share):
    """Binary, categorical or sparse accuracy, by the kind of problem that shapes tell.

    The rule is Keras's for `"accuracy"`: one output per sample is binary; targets
    without the class axis are class indices; else they are one-hot.

    Args:
        from_logits: Whether binary outputs are logits; else they are probabilities.
        name: Its key in logs.

    Example:
        >>> scores = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
        >>> Accuracy().sums(scores, torch.tensor([1, 1]))
        tensor([1., 2.])
    """

    def __init__(self, from_logits: bool = True, name: str = "accuracy") -> None:
        super().__init__(name)
        self._binary = BinaryAccuracy(from_logits=from_logits)

    def _judged(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if is_binary(outputs):
            return self._binary._judged(outputs, targets, weights)
        return _best(outputs, targets, weights)


class TopKAccuracy(_Share):
    """The share of samples whose class is among the `k` highest scores.

    Of equal scores that of the earlier class counts as higher, and none is higher than
    one that is no number.

    Args:
        k: How many.
        name: Its key in logs.

    Example:
        >>> scores = torch.tensor([[0.5, 0.4, 0.1], [0.5, 0.4, 0.1]])
        >>> TopKAccuracy(2).sums(scores, torch.tensor([1, 2]))
        tensor([1., 2.])
    """

    def __init__(self, k: int = 5, name: str | None = None) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigError(f"{type(self).__name__}(k={k!r}): use a number from 1.")
        super().__init__(name or f"top_{k}_accuracy")
        self._k = k

    def _judged(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        scores, labels, counts = classified(outputs, targets, weights)
        is_own = one_hot(labels, scores.shape[-1])
        own = torch.where(is_own, scores, zeros_like(scores)).sum(-1, True)
        is_earlier = is_own.to(torch.float32).cumsum(dim=-1).eq(0)
        ahead = scores.le(own).logical_not()
        ahead = ahead.logical_or(scores.eq(own).logical_and(is_earlier))
        return ahead.to(torch.float32).sum(dim=-1).lt(self._k), counts


class TopKCategoricalAccuracy(TopKAccuracy):
    """`TopKAccuracy` of one-hot targets.

    Args:
        k: How many.
        name: Its key in logs.
    """

    def __init__(self, k: int = 5, name: str = "top_k_categorical_accuracy") -> None:
        super().__init__(k, name)

    def _judged(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return super()._judged(outputs, dense_targets(outputs, targets), weights)


class SparseTopKCategoricalAccuracy(TopKAccuracy):
    """`TopKAccuracy` of class indices.

    Args:
        k: How many.
        name: Its key in logs.
    """

    def __init__(
        self, k: int = 5, name: str = "sparse_top_k_categorical_accuracy"
    ) -> None:
        super().__init__(k, name)

    def _judged(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return super()._judged(outputs, class_indices(outputs, targets), weights)


def _best(
    outputs: Tensor, targets: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Whether the highest score is the target's."""
    if weights is not None:
        scores, labels, counts = classified(outputs, targets, weights)
        return scores.argmax(dim=-1).eq(labels), counts
    if has_class_axis(outputs, targets):
        return outputs.argmax(dim=-1).eq(targets.argmax(dim=-1)), None
    labels = class_indices(outputs, targets)
    if labels.shape != outputs.shape[:-1]:
        outputs = outputs.movedim(1, -1)
    return outputs.argmax(dim=-1).eq(labels), labels.ne(IGNORED_INDEX)
