# SPDX-License-Identifier: Apache-2.0
"""Correlations of outputs and targets, over all samples.

With several numbers per sample, each has a value of its own; the metric is their mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import CollectingMetric, Metric, weighed
from .moments import NUM_LIMBS, centred, comoment, product_limbs, sum_limbs
from .shapes import elements, is_binary
from .streamed import kept_rows

__all__ = [
    "ExplainedVariance",
    "PearsonCorrelation",
    "R2Score",
    "SpearmanCorrelation",
]


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
        sums: Tensor = torch.cat([totals, *limbs]).reshape(-1)
        return sums

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
        sums: Tensor = torch.cat([counts.sum(dim=0, keepdim=True), *limbs]).reshape(-1)
        return sums

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
        sums: Tensor = torch.cat([counts.sum(dim=0, keepdim=True), *limbs]).reshape(-1)
        return sums

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
    ranks: Tensor = (last - (counts - 1).to(torch.float64) / 2)[place]
    return ranks
