# SPDX-License-Identifier: Apache-2.0
"""Cross-entropies and other distances of distributions.

Outputs are logits, as torch's losses take them, unless `from_logits` is False. torch's
loss functions aren't called: PopTorch would take a call for a second loss. The
functions return one value per sample, position or output. The classes are means of
these values.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ipufit._arguments import check_number

from .base import (
    IGNORED_INDEX,
    FunctionMetric,
    MeanMetric,
    Weighted,
    Weights,
    bits,
    checked_flag,
    class_indices,
    classified,
    dense_targets,
    has_class_axis,
    is_of_bits,
    matched_targets,
    weighted,
    weights_like,
    whole_rows,
)

EPSILON = 1e-7
"""Probabilities are clipped to the range [EPSILON, 1 - EPSILON], as in Keras."""


def binary_crossentropy(
    outputs: Tensor, targets: Tensor, from_logits: bool = True
) -> Tensor:
    """Return the cross-entropy of each output's probability with a target of 0 to 1.

    Args:
        outputs: Logits of any shape.
        targets: Probabilities of the same shape, up to axes of size 1.
        from_logits: Whether outputs are logits; else they are probabilities.

    Returns:
        Tensor of the outputs' shape, in nats.

    Example:
        >>> binary_crossentropy(torch.tensor([0.0]), torch.tensor([1]))
        tensor([0.6931])
    """
    truths = matched_targets(outputs, targets)
    scores = outputs.to(torch.float32)
    if from_logits:
        tail = softplus(-scores.abs())
        values: Tensor = scores.clamp(min=0.0) - scores * truths + tail
    else:
        likely = scores.clamp(EPSILON, 1.0 - EPSILON)
        values = -(truths * likely.log() + (1.0 - truths) * (1.0 - likely).log())
    return values


def categorical_crossentropy(
    outputs: Tensor, targets: Tensor, from_logits: bool = True
) -> Tensor:
    """Return the cross-entropy of distributions over classes.

    Args:
        outputs: Logits `[..., C]`.
        targets: One-hot or probabilities `[..., C]`.
        from_logits: Whether outputs are logits; else they are probabilities.

    Returns:
        One value per sample, in nats.

    Example:
        >>> categorical_crossentropy(torch.zeros(1, 2), torch.tensor([[0, 1]]))
        tensor([0.6931])
    """
    outputs, dense = dense_targets(outputs, targets)
    logs = _log_probabilities(outputs, from_logits)
    return weighted(logs, dense).sum(dim=-1).neg()


def kl_divergence(outputs: Tensor, targets: Tensor, from_logits: bool = True) -> Tensor:
    """Return the Kullback-Leibler divergence of the outputs from the targets.

    Args:
        outputs: Logits or logarithms of probabilities `[..., C]`.
        targets: Probabilities `[..., C]`.
        from_logits: Whether outputs are logits or logarithms; else they are
            probabilities.

    Returns:
        One value per sample, in nats.

    Example:
        >>> kl_divergence(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))
        tensor([0.6931])
    """
    outputs, dense = dense_targets(outputs, targets)
    # A target of 0 adds 0, whatever its logarithm.
    ratios = dense.clamp(min=1e-37).log() - _log_probabilities(outputs, from_logits)
    return weighted(ratios, dense).sum(dim=-1)


def poisson(outputs: Tensor, targets: Tensor, log_input: bool = True) -> Tensor:
    """Return the Poisson loss of rates, without the term that depends on targets only.

    Args:
        outputs: Logarithms of rates, as torch's loss takes them, of any shape.
        targets: Counts of the same shape, up to axes of size 1.
        log_input: Whether outputs are logarithms; else they are rates.

    Example:
        >>> poisson(torch.tensor([2.0]), torch.tensor([3]), log_input=False)
        tensor([-0.0794])
    """
    counts, rates = matched_targets(outputs, targets), outputs.to(torch.float32)
    if log_input:
        values: Tensor = rates.exp() - counts * rates
    else:
        values = rates - counts * (rates + EPSILON).log()
    return values


class _LogLoss(MeanMetric):
    """Base of metrics that average a loss of logits or probabilities.

    Args:
        from_logits: Whether outputs are logits, as in `ipufit.metrics.BinaryAccuracy`.
        name: Key in logs.
    """

    def __init__(
        self, from_logits: bool | None = None, name: str | None = None
    ) -> None:
        super().__init__(name)
        self._from_logits = checked_flag("from_logits", from_logits)


class BinaryCrossentropy(_LogLoss):
    """The mean cross-entropy of outputs with one probability each.

    Args:
        from_logits: Whether outputs are logits, as in `ipufit.metrics.BinaryAccuracy`.
        name: Key in logs.

    Example:
        >>> BinaryCrossentropy().sums(torch.zeros(2), torch.ones(2))
        tensor([1.3863, 2.0000])
    """

    ignore_index = IGNORED_INDEX
    _default_name = "binary_crossentropy"

    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        return _binary_values(self, outputs, targets, weights)


class CategoricalCrossentropy(_LogLoss):
    """The mean cross-entropy with one-hot targets or probabilities.

    Args:
        from_logits: Whether outputs are logits, as in `ipufit.metrics.BinaryAccuracy`.
        name: Key in logs.

    Example:
        >>> CategoricalCrossentropy().sums(torch.zeros(1, 2), torch.tensor([[0, 1]]))
        tensor([0.6931, 1.0000])
    """

    _default_name = "categorical_crossentropy"

    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        function = categorical_crossentropy
        return _dense_values(self, function, outputs, targets, weights)


class KLDivergence(_LogLoss):
    """The mean Kullback-Leibler divergence of the outputs from the targets.

    Args:
        from_logits: Whether outputs are logits or logarithms, as in
            `ipufit.metrics.BinaryAccuracy`.
        name: Key in logs.

    Example:
        >>> KLDivergence().sums(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))
        tensor([0.6931, 1.0000])
    """

    _default_name = "kl_divergence"

    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        return _dense_values(self, kl_divergence, outputs, targets, weights)


class NegativeLogLikelihood(MeanMetric):
    """The mean of the negative outputs at the class indices.

    Outputs are logarithms of probabilities, as for torch's loss.

    Args:
        ignore_index: Class index of targets that are ignored.
        name: Key in logs.

    Example:
        >>> metric = NegativeLogLikelihood()
        >>> metric.sums(torch.tensor([[-2.0, -1.0]]), torch.tensor([1]))
        tensor([1., 1.])
    """

    ignore_index: int
    _default_name = "nll_loss"

    def __init__(
        self, ignore_index: int = IGNORED_INDEX, name: str | None = None
    ) -> None:
        super().__init__(name)
        check_number("ignore_index", ignore_index, is_whole=True)
        self.ignore_index = ignore_index

    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        class_indices(outputs, targets)  # refuses one-hot targets
        ignored = (self.ignore_index,)
        scores, labels, counts = classified(outputs, targets, weights, ignored)
        index = labels.clamp(0, scores.shape[-1] - 1).to(torch.int64).unsqueeze(-1)
        return self._logs(scores).gather(-1, index).squeeze(-1).neg(), counts

    def _logs(self, scores: Tensor) -> Tensor:
        """Return the logarithms of the classes' probabilities."""
        return scores


class SparseCategoricalCrossentropy(NegativeLogLikelihood):
    """The mean cross-entropy with class indices.

    Args:
        from_logits: Whether outputs are logits, as in `ipufit.metrics.BinaryAccuracy`.
        ignore_index: Class index of targets that are ignored.
        name: Key in logs.

    Example:
        >>> metric = SparseCategoricalCrossentropy()
        >>> metric.sums(torch.zeros(2, 2), torch.tensor([1, -100]))
        tensor([0.6931, 1.0000])
    """

    _default_name = "sparse_categorical_crossentropy"

    def __init__(
        self,
        from_logits: bool | None = None,
        ignore_index: int = IGNORED_INDEX,
        name: str | None = None,
    ) -> None:
        super().__init__(ignore_index, name)
        self._from_logits = checked_flag("from_logits", from_logits)

    def _logs(self, scores: Tensor) -> Tensor:
        return _log_probabilities(scores, self._takes_logits)


class CrossEntropy(SparseCategoricalCrossentropy):
    """The mean cross-entropy: binary, categorical or sparse, chosen by the shapes.

    Args:
        from_logits: Whether outputs are logits, as in `ipufit.metrics.BinaryAccuracy`.
        ignore_index: Class index of targets that are ignored.
        name: Key in logs.

    Example:
        >>> CrossEntropy().sums(torch.zeros(2, 1), torch.tensor([1, 0]))
        tensor([1.3863, 2.0000])
    """

    _default_name = "crossentropy"

    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        if is_of_bits(outputs, targets, has_binary_loss=self.has_binary_loss):
            return _binary_values(self, outputs, targets, weights)
        if has_class_axis(outputs, targets):
            function = categorical_crossentropy
            return _dense_values(self, function, outputs, targets, weights)
        return super()._values(outputs, targets, weights)


class Perplexity(CrossEntropy):
    """The exponential of the mean cross-entropy.

    A model that guesses between `n` classes has the perplexity `n`.

    Args:
        from_logits: Whether outputs are logits, as in `ipufit.metrics.BinaryAccuracy`.
        ignore_index: Class index of targets that are ignored.
        name: Key in logs.

    Example:
        >>> metric = Perplexity()
        >>> sums = metric.sums(torch.zeros(2, 4), torch.tensor([3, 1]))
        >>> round(metric.result(sums.double()), 4)
        4.0
    """

    _default_name = "perplexity"

    def result(self, sums: Tensor) -> float:
        """Compute the exponential of the mean."""
        mean = torch.tensor(super().result(sums), dtype=torch.float64)
        return float(mean.exp())


class Poisson(FunctionMetric):
    """The mean Poisson loss of rates.

    Args:
        log_input: Whether outputs are logarithms of rates; else they are rates.
        name: Key in logs.

    Example:
        >>> Poisson(log_input=False).sums(torch.tensor([2.0]), torch.tensor([3]))
        tensor([-0.0794,  1.0000])
    """

    def __init__(self, log_input: bool = True, name: str = "poisson") -> None:
        function = partial(poisson, log_input=checked_flag("log_input", log_input))
        super().__init__(name, function, "min")


def _log_probabilities(scores: Tensor, from_logits: bool) -> Tensor:
    scores = scores.to(torch.float32)
    if from_logits:
        return torch.log_softmax(scores, dim=-1)
    shares = scores / scores.sum(dim=-1, keepdim=True)
    return shares.clamp(EPSILON, 1.0 - EPSILON).log()


def _binary_values(
    metric: Any, outputs: Tensor, targets: Tensor, weights: Weights
) -> Weighted:
    """Return binary cross-entropies, and the weights of the targets."""
    counts = bits(outputs, targets, weights, 0, (metric.ignore_index,)).weights
    return binary_crossentropy(outputs, targets, metric._takes_logits), counts


def _dense_values(
    metric: Any, function: Any, outputs: Tensor, targets: Tensor, weights: Weights
) -> Weighted:
    """Return a loss of each row, and weights, NaN for rows that don't sum to 1."""
    values = function(outputs, targets, metric._takes_logits)
    dense = dense_targets(outputs, targets)[1]
    return values, whole_rows(dense, weights_like(values, weights))
