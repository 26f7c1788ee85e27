# SPDX-License-Identifier: Apache-2.0
"""Correlations of outputs and targets, over all samples.

With several numbers per sample, each has a value of its own; the metric is their mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import CollectingMetric, Metric, elements, is_binary, weighed
from .streamed import kept_rows

__all__ = [
    "ExplainedVariance",
    "PearsonCorrelation",
    "R2Score",
    "SpearmanCorrelation",
]

# Sums of numbers and of their products, exact enough for variances. If numbers are far
# from 0, a variance is the small difference of large sums. So the numbers of each batch
# are centred around a value of few digits, whose products are exact. Each sum is split
# into limbs: multiples of fixed powers of 2. They have so few digits that adding
# batches in float32 on a device rounds nothing.

LIMBS = tuple(2.0**exponent for exponent in (36, 24, 12, 0, -12, -24))
"""Units: the limbs of a sum are multiples of these, and one more is the rest."""
NUM_LIMBS = len(LIMBS) + 1


def centred(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return a number near the mean of each column, and the differences from it.

    Args:
        values: `[N, K]`, float32.
        weights: `[N, K]`.

    Returns:
        The numbers `[K]`, of so few digits that their products are exact, and the
        differences `[N, K]`.

    Example:
        >>> centre, away = centred(torch.tensor([[1001.0], [1003.0]]), torch.ones(2, 1))
        >>> centre, away.tolist()
        (tensor([1000.]), [[1.0], [3.0]])
    """
    total = weights.sum(dim=0)
    mean = weighed(values, weights).sum(dim=0) / total.clamp(min=1e-30)
    centre = _few_digits(mean)
    return centre, values - centre


def product_limbs(
    x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor], weights: Tensor
) -> Tensor:
    """Return the sum of the weighted products `x * y`, in limbs.

    Args:
        x: Result of `centred`.
        y: Result of `centred` for the same or other values.
        weights: `[N, K]`.

    Returns:
        `[NUM_LIMBS, K]`.

    Example:
        >>> weights = torch.ones(2, 1)
        >>> x = centred(torch.tensor([[1001.0], [1003.0]]), weights)
        >>> product_limbs(x, x, weights).sum()
        tensor(2008010.)
    """
    (x_centre, x_away), (y_centre, y_away) = x, y
    return torch.stack(
        [
            _limbs(_exact(weights.sum(dim=0), x_centre * y_centre)),
            _limbs(_exact(weighed(y_away, weights).sum(dim=0), x_centre)),
            _limbs(_exact(weighed(x_away, weights).sum(dim=0), y_centre)),
            _limbs([weighed(x_away * y_away, weights).sum(dim=0)]),
        ]
    ).sum(dim=0)


def sum_limbs(x: tuple[Tensor, Tensor], weights: Tensor) -> Tensor:
    """Return the sum of weighted values, in limbs.

    Args:
        x: Result of `centred`.
        weights: `[N, K]`.

    Returns:
        `[NUM_LIMBS, K]`.

    Example:
        >>> weights = torch.ones(2, 1)
        >>> x = centred(torch.tensor([[1001.0], [1003.0]]), weights)
        >>> sum_limbs(x, weights).sum()
        tensor(2004.)
    """
    centre, away = x
    terms = _exact(weights.sum(dim=0), centre)
    return _limbs([*terms, weighed(away, weights).sum(dim=0)])


def comoment(x: Tensor, y: Tensor, products: Tensor, count: Tensor) -> Tensor:
    """Return the sum of products of two variables' differences from their means.

    Args:
        x: The sum of one variable, float64 as all arguments.
        y: The sum of the other variable, or the same one.
        products: The sum of their products.
        count: The sum of the weights.

    Returns:
        The co-moment; 0 where it is no larger than rounding errors: where numbers vary
        by less than 1e-5 of their mean.

    Example:
        >>> one = torch.tensor(1.0, dtype=torch.float64)
        >>> comoment(2 * one, 2 * one, 4 * one, 2 * one)
        tensor(2., dtype=torch.float64)
    """
    expected = x * y / count
    difference = products - expected
    is_noise = difference.abs() < 1e-10 * torch.maximum(expected.abs(), products.abs())
    return torch.where(is_noise, torch.zeros_like(difference), difference)


def _exact(factor: Tensor, short: Tensor) -> list[Tensor]:
    """Split a product into exact terms; `short` has at most 16 binary digits."""
    head = _few_digits(factor)
    return [head * short, (factor - head) * short]


def _limbs(terms: list[Tensor]) -> Tensor:
    """Split terms into multiples of each of `LIMBS` and the rest, and sum each."""
    limbs, rests = [], torch.stack(terms)
    for unit in LIMBS:
        limb = torch.round(rests.div(unit)).mul(unit)
        limbs.append(limb.sum(dim=0))
        rests = rests.sub(limb)
    return torch.stack([*limbs, rests.sum(dim=0)])


def _few_digits(values: Tensor) -> Tensor:
    """Round values to the first 8 of their 24 binary digits (Veltkamp)."""
    large = values * (2.0**16 + 1.0)
    return large - (large - values)


class R2Score(Metric):
    """The share of the targets' variance that outputs explain.

    Args:
        name: Key in logs.

    Example:
        >>> metric, targets = R2Score(), torch.tensor([1.0, 2.0, 3.0])
        >>> metric.result(metric.sums(targets + 1, targets).double())
        -0.5
    """

    direction = "max"

    def __init__(self, name: str = "r2_score") -> None:
        super().__init__(name)

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return weight and squared-error sums, and moments of targets, per output."""
        predicted, actual, counts = _columns(outputs, targets, weights)
        y = centred(actual, counts)
        errors = weighed(torch.square(predicted - actual), counts)
        totals = torch.stack([counts, errors]).sum(dim=1)
        limbs = [sum_limbs(y, counts), product_limbs(y, y, counts)]
        return torch.cat([totals, *limbs]).reshape(-1)

    def result(self, sums: Tensor) -> float:
        """Average over outputs; constant targets score 1 if predicted exactly, or 0."""
        (count, errors), (y, yy) = _unpacked(sums, 2, 2)
        return _mean_share(errors, comoment(y, y, yy, count), count)


class ExplainedVariance(Metric):
    """The share of the targets' variance that vanishes when outputs are subtracted.

    It differs from `R2Score` in that a constant added to all outputs doesn't matter.

    Args:
        name: Key in logs.

    Example:
        >>> metric, targets = ExplainedVariance(), torch.tensor([1.0, 2.0, 3.0])
        >>> metric.result(metric.sums(targets + 1, targets).double())
        1.0
    """

    direction = "max"

    def __init__(self, name: str = "explained_variance") -> None:
        super().__init__(name)

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return sums of weights, and moments of targets and errors, per output."""
        predicted, actual, counts = _columns(outputs, targets, weights)
        limbs = []
        for values in (actual, actual - predicted):
            x = centred(values, counts)
            limbs += [sum_limbs(x, counts), product_limbs(x, x, counts)]
        return torch.cat([counts.sum(dim=0, keepdim=True), *limbs]).reshape(-1)

    def result(self, sums: Tensor) -> float:
        """Average over outputs; constant targets score 1 or 0 as in `R2Score`."""
        (count,), (y, yy, d, dd) = _unpacked(sums, 1, 4)
        left = comoment(d, d, dd, count)
        return _mean_share(left, comoment(y, y, yy, count), count)


class PearsonCorrelation(Metric):
    """Pearson's correlation of outputs and targets over the samples.

    Args:
        name: Key in logs.

    Example:
        >>> metric, targets = PearsonCorrelation(), torch.tensor([1.0, 2.0, 3.0])
        >>> metric.result(metric.sums(7 - 2 * targets, targets).double())
        -1.0
    """

    direction = "max"

    def __init__(self, name: str = "pearson_correlation") -> None:
        super().__init__(name)

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return sums of weights, and moments of outputs and targets, per output."""
        predicted, actual, counts = _columns(outputs, targets, weights)
        x, y = centred(predicted, counts), centred(actual, counts)
        limbs = [sum_limbs(x, counts), sum_limbs(y, counts)]
        limbs += [product_limbs(a, b, counts) for a, b in ((x, x), (y, y), (x, y))]
        return torch.cat([counts.sum(dim=0, keepdim=True), *limbs]).reshape(-1)

    def result(self, sums: Tensor) -> float:
        """Average over outputs; NaN if outputs or targets are constant."""
        (count,), (x, y, xx, yy, xy) = _unpacked(sums, 1, 5)
        spread = comoment(x, x, xx, count) * comoment(y, y, yy, count)
        # Not `comoment`: beside the spreads a small covariance is small, not noise.
        values = (xy - x * y / count) / torch.sqrt(spread)
        values = values.clamp(-1.0, 1.0).masked_fill(spread.eq(0), float("nan"))
        return float(values.mean())


class SpearmanCorrelation(CollectingMetric):
    """Spearman's rank correlation; all outputs are stored on the host.

    Sample weights must be 0 or 1: ranks can't be weighted.

    Args:
        name: Key in logs.

    Example:
        >>> metric = SpearmanCorrelation()
        >>> metric.update(torch.tensor([1.0, 10.0, 100.0]), torch.tensor([1, 2, 3]))
        >>> metric.result()
        1.0
    """

    direction = "max"

    def __init__(self, name: str = "spearman_correlation") -> None:
        super().__init__(name)

    def update(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> None:
        """Store a batch without its rows of weight 0."""
        if weights is not None:
            outputs, targets = kept_rows(self.name, outputs, targets, weights)
        predicted, actual, _ = _columns(outputs, targets, None)
        self.batches.append(torch.stack([predicted, actual]))

    def _figure(self) -> float:
        """Average over outputs; NaN if outputs or targets are constant."""
        columns = torch.cat(self.batches, dim=1).permute(0, 2, 1)  # [2, K, N]
        if bool(torch.isnan(columns).any()):
            return float("nan")
        ranks = torch.stack([_ranks(c) for c in columns.reshape(-1, columns.shape[2])])
        away = ranks - ranks.mean(dim=1, keepdim=True)
        x, y = away.reshape(columns.shape)
        spread = x.square().sum(dim=1) * y.square().sum(dim=1)
        return float(((x * y).sum(dim=1) / spread.sqrt()).mean())


def _columns(
    outputs: Tensor, targets: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Reshape outputs, targets and weights to `[N, K]`, without gradients."""
    size = 1 if is_binary(outputs) else outputs.shape[-1]
    predicted, actual, counts = (
        part.detach().reshape(-1, size) for part in elements(outputs, targets, weights)
    )
    return predicted, actual, counts


def _unpacked(
    sums: Tensor, num_totals: int, num_exact: int
) -> tuple[Tensor, list[Tensor]]:
    """Split sums into totals and limbs of exact sums, each `[K]`."""
    rows = sums.to(torch.float64).reshape(num_totals + num_exact * NUM_LIMBS, -1)
    limbs = rows[num_totals:].reshape(num_exact, NUM_LIMBS, -1)
    return rows[:num_totals], list(limbs.sum(dim=1))


def _mean_share(left: Tensor, whole: Tensor, count: Tensor) -> float:
    """Average `1 - left / whole`; where `whole` is 0, use 1 if `left` is 0, else 0."""
    nothing = left.eq(0).to(torch.float64)
    shares = torch.where(whole.gt(0), left.div(whole).neg().add(1.0), nothing)
    return float((shares + 0.0 / count).mean())  # NaN if nothing was counted


def _ranks(values: Tensor) -> Tensor:
    """Rank values in ascending order from 1; equal values get their mean rank."""
    _, place, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).to(torch.float64)
    return (last - (counts - 1).to(torch.float64) / 2)[place]
