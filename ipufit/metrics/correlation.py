# SPDX-License-Identifier: Apache-2.0
"""Correlations of outputs and targets, over all samples.

With several numbers per sample, the metric is the mean of the values of each number.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import torch
from torch import Tensor

from ipufit._arguments import check_choice, check_integer

from .base import (
    CollectingMetric,
    Metric,
    elements,
    is_binary,
    one_hot,
    weighted,
    zeros_like,
)
from .streamed import kept

# Sums of numbers and of their products, exact enough for variances at any scale. If
# numbers are far from 0, a variance is the small difference of large sums. So the
# numbers of each batch are centered around the sum of two values of few digits, whose
# products are exact. The second value is for numbers that differ only in the last
# digits. Each sum is split into limbs: multiples of fixed powers of 2. They have so few
# digits that adding batches in float32 on a device rounds nothing. A power of 2 brings
# the numbers of a batch near 1 first, so that no square overflows or vanishes, and each
# power has limbs of its own.

POWERS = (64, 0, -64)
"""Numbers up to 2**-32, up to 2**32 and above are multiplied by 2 to these powers."""
UNITS = tuple(2.0**exponent for exponent in range(84, -121, -12))
"""The limbs of a sum are multiples of these numbers."""


class Centered(NamedTuple):
    """Numbers of a batch as centers and the differences from them, all scaled.

    Attributes:
        centers: Two tensors `[K]`, whose sum is near the means, each with so few digits
            that products are exact.
        away: `[N, K]`: the numbers minus their centers.
        place: `[K]`: the index in `POWERS` of the power that scaled them.
    """

    centers: tuple[Tensor, Tensor]
    away: Tensor
    place: Tensor


def centered(values: Tensor, weights: Tensor) -> Centered:
    """Scale the columns of numbers, and split them into centers and differences.

    Args:
        values: `[N, K]`, float32.
        weights: `[N, K]`.

    Example:
        >>> x = centered(torch.tensor([[1001.0], [1003.0]]), torch.ones(2, 1))
        >>> x.centers, x.away.tolist(), x.place.tolist()
        ((tensor([1000.]), tensor([2.])), [[-1.0], [1.0]], [1])
    """
    largest = values.abs().amax(dim=0)
    is_small, is_large = largest.lt(2.0**-32), largest.gt(2.0**32)
    factor = torch.ones_like(largest)
    factor = torch.where(is_small, factor * 2.0 ** POWERS[0], factor)
    factor = torch.where(is_large, factor * 2.0 ** POWERS[2], factor)
    place = 1 - is_small.to(torch.int32) + is_large.to(torch.int32)
    values, sizes = values * factor, weights.abs()
    total = sizes.sum(dim=0).clamp(min=1e-30)
    mean = weighted(values, sizes).sum(dim=0) / total
    near = _few_digits(mean)
    centers = near, _few_digits(mean - near)
    return Centered(centers, values - centers[0] - centers[1], place)


def sum_limbs(x: Centered, weights: Tensor) -> Tensor:
    """Return the sum of weighted numbers, in limbs.

    Args:
        x: The numbers.
        weights: `[N, K]`.

    Returns:
        `[3 * len(UNITS), K]`: the limbs, in the rows of their power; other rows are 0.

    Example:
        >>> weights = torch.ones(2, 1)
        >>> x = centered(torch.tensor([[1001.0], [1003.0]]), weights)
        >>> sum_limbs(x, weights).sum()
        tensor(2004.)
    """
    terms = _exact(weights.sum(dim=0), x.centers)
    return _limbs([*terms, weighted(x.away, weights).sum(dim=0)], x.place, 3)


def product_limbs(x: Centered, y: Centered, weights: Tensor) -> Tensor:
    """Return the sum of the weighted products `x * y`, in limbs.

    Args:
        x: The numbers.
        y: The same or other numbers.
        weights: `[N, K]`.

    Returns:
        `[5 * len(UNITS), K]`: the limbs, in the rows of the product of both powers.

    Example:
        >>> weights = torch.ones(2, 1)
        >>> x = centered(torch.tensor([[1001.0], [1003.0]]), weights)
        >>> product_limbs(x, x, weights).sum()
        tensor(2008010.)
    """
    products = [a * b for a in x.centers for b in y.centers]
    terms = [
        *_exact(weights.sum(dim=0), products),
        *_exact(weighted(y.away, weights).sum(dim=0), x.centers),
        *_exact(weighted(x.away, weights).sum(dim=0), y.centers),
        weighted(x.away * y.away, weights).sum(dim=0),
    ]
    return _limbs(terms, x.place + y.place, 5)


def comoment(x: Tensor, y: Tensor, products: Tensor, count: Tensor) -> Tensor:
    """Return the sum of products of two variables' differences from their means.

    Args:
        x: The sum of one variable, float64 like all arguments.
        y: The sum of the other variable, which may be the same.
        products: The sum of their products.
        count: The sum of the weights.

    Returns:
        The co-moment; 0 where it is no larger than rounding errors: where numbers vary
        by less than 1e-7 of their mean, as float32 rounds.

    Example:
        >>> sums = torch.tensor([2.0, 2.0, 4.0, 2.0], dtype=torch.float64)
        >>> comoment(*sums)
        tensor(2., dtype=torch.float64)
    """
    expected = x * y / count
    difference = products - expected
    is_noise = difference.abs() < 1e-14 * torch.maximum(expected.abs(), products.abs())
    return torch.where(is_noise, torch.zeros_like(difference), difference)


def _exact(factor: Tensor, shorts: Sequence[Tensor]) -> list[Tensor]:
    """Split products into exact terms; `shorts` have at most 16 binary digits."""
    head = _few_digits(factor)
    middle = _few_digits(factor - head)
    parts = head, middle, factor - head - middle
    return [part * short for short in shorts for part in parts]


def _limbs(terms: list[Tensor], place: Tensor, num_places: int) -> Tensor:
    """Split terms into multiples of each of `UNITS`, and sum each."""
    limbs, rests = [], torch.stack(terms)
    for unit in UNITS:
        limb = torch.round(rests.div(unit)).mul(unit)
        limbs.append(limb.sum(dim=0))
        rests = rests.sub(limb)
    is_here = one_hot(place, num_places).T.unsqueeze(1)  # [places, 1, K]
    parts = torch.stack(limbs)  # [L, K]
    return torch.where(is_here, parts, zeros_like(parts)).reshape(-1, parts.shape[1])


def _few_digits(values: Tensor) -> Tensor:
    """Round values to the first 8 of their 24 binary digits (Veltkamp)."""
    large = values * (2.0**16 + 1.0)
    return large - (large - values)


class _VarianceShare(Metric):
    """Base of metrics that divide errors by the variance of the targets.

    Args:
        name: Key in logs.
    """

    direction = "max"

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return sums of weights, and moments of targets and errors, per output."""
        predicted, actual, counts = _columns(outputs, targets, weights)
        columns = actual, actual - predicted
        y, errors = (centered(column, counts) for column in columns)
        return _packed(
            counts,
            *(sum_limbs(x, counts) for x in (y, errors)),
            *(product_limbs(x, x, counts) for x in (y, errors)),
        )


class R2Score(_VarianceShare):
    """The share of the targets' variance that outputs explain.

    Args:
        class_aggregation: `"uniform_average"` is the mean over outputs,
            `"variance_weighted_average"` the mean weighted by the targets' variances;
            None for a value of each output, `r2_score_0` and so on.
        num_regressors: Number of inputs p of the model, for the adjusted score `1 - (1
            - r2) * (n - 1) / (n - p - 1)` of n samples; it is NaN if n is below p + 2.
        name: Key in logs.

    Example:
        >>> metric, targets = R2Score(), torch.tensor([1.0, 2.0, 3.0])
        >>> metric.result(metric.sums(targets + 1, targets).double())
        -0.5
    """

    _default_name = "r2_score"

    def __init__(
        self,
        class_aggregation: str | None = "uniform_average",
        num_regressors: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        averages = ("uniform_average", "variance_weighted_average", None)
        check_choice("class_aggregation", class_aggregation, averages)
        check_integer("num_regressors", num_regressors, of="R2Score")
        self._average, self._num_regressors = class_aggregation, num_regressors
        if class_aggregation is None:
            self.has_parts = True

    def result(self, sums: Tensor) -> Any:
        """Average over outputs; constant targets score 1 if predicted exactly, or 0.

        The value is NaN for fewer than two samples, and a dict without an average.
        """
        rows, count, (y, _), (yy, errors) = _unpacked(sums, 2)
        count = count.masked_fill(rows.lt(2), float("nan"))
        spread = comoment(y, y, yy, count)
        shares = _shares(errors, spread, count)
        if self._average is not None:
            factors = torch.ones_like(spread)
            # If all targets are constant, outputs count alike, as in scikit-learn.
            if self._average == "variance_weighted_average" and spread.any():
                factors = spread
            shares = shares.mul(factors).sum(dim=0, keepdim=True).div(factors.sum())
        if self._num_regressors:
            left = rows.max() - self._num_regressors - 1
            left = left.masked_fill(left.lt(1), float("nan"))
            shares = 1 - (1 - shares) * (rows.max() - 1) / left
        if self._average is not None or len(shares) == 1:
            return float(shares)
        return {str(index): share for index, share in enumerate(shares.tolist())}


class ExplainedVariance(_VarianceShare):
    """The share of the targets' variance that vanishes when outputs are subtracted.

    It differs from `R2Score` in that a constant added to all outputs doesn't matter.

    Args:
        name: Key in logs.

    Example:
        >>> metric, targets = ExplainedVariance(), torch.tensor([1.0, 2.0, 3.0])
        >>> metric.result(metric.sums(targets + 1, targets).double())
        1.0
    """

    _default_name = "explained_variance"

    def result(self, sums: Tensor) -> float:
        """Average over outputs; constant targets score 1 or 0 as in `R2Score`."""
        _, count, (y, d), (yy, dd) = _unpacked(sums, 2)
        left = comoment(d, d, dd, count)
        return float(_shares(left, comoment(y, y, yy, count), count).mean())


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
    _default_name = "pearson_correlation"

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return sums of weights, and moments of outputs and targets, per output."""
        predicted, actual, counts = _columns(outputs, targets, weights)
        x, y = (centered(part, counts) for part in (predicted, actual))
        pairs = ((x, x), (y, y), (x, y))
        return _packed(
            counts,
            *(sum_limbs(part, counts) for part in (x, y)),
            *(product_limbs(*pair, counts) for pair in pairs),
        )

    def result(self, sums: Tensor) -> float:
        """Average over outputs; NaN if outputs or targets are constant."""
        _, count, (x, y), (xx, yy, xy) = _unpacked(sums, 3)
        spread = comoment(x, x, xx, count) * comoment(y, y, yy, count)
        # Not `comoment`, which would round a small covariance to 0.
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
    _default_name = "spearman_correlation"

    def _rows(self, outputs: Any, targets: Any, weights: Tensor | None) -> list[Tensor]:
        predicted, actual, counts = _columns(outputs, targets, weights)
        return [predicted, actual, kept(self.name, counts)]

    def _compute(self, *rows: Tensor) -> float:
        """Average over outputs; NaN if outputs or targets are constant."""
        columns = list(zip(*(part.unbind(1) for part in rows)))
        return sum(_rank_correlation(*column) for column in columns) / len(columns)


def _rank_correlation(x: Tensor, y: Tensor, is_kept: Tensor) -> float:
    """Correlate the ranks of the numbers that `is_kept` selects."""
    pairs = torch.stack([x, y])[:, is_kept]
    if bool(pairs.isnan().any()):
        return float("nan")
    ranks = torch.stack([_ranks(part) for part in pairs])
    x, y = ranks - ranks.mean(dim=1, keepdim=True)
    return float((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt())


def _columns(
    outputs: Tensor, targets: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Reshape outputs, targets and weights to `[N, K]`; rows of weight 0 become 0."""
    size = 1 if is_binary(outputs) else outputs.shape[-1]
    predicted, actual, counts = (
        part.detach().reshape(-1, size) for part in elements(outputs, targets, weights)
    )
    marks = counts.ne(0).to(torch.float32)
    return weighted(predicted, marks), weighted(actual, marks), counts


def _packed(counts: Tensor, *limbs: Tensor) -> Tensor:
    """Join numbers of rows, and limbs of weights and other sums, into one vector."""
    rows = counts.ne(0).to(torch.float32).sum(dim=0, keepdim=True)
    unscaled = torch.ones_like(rows[0], dtype=torch.int32)
    weights = _limbs([counts.sum(dim=0)], unscaled, 3)
    return torch.cat([rows, weights, *limbs]).reshape(-1)


def _unpacked(
    sums: Tensor, num_products: int
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Compute rows, weights, two sums and sums of products, each `[K]`, from limbs."""
    lengths = [3 * len(UNITS)] * 3 + [5 * len(UNITS)] * num_products
    rows, *limbs = torch.split(
        sums.to(torch.float64).reshape(1 + sum(lengths), -1), [1, *lengths]
    )
    count, *moments = (
        _total(part.reshape(-1, len(UNITS), part.shape[1])) for part in limbs
    )
    return rows[0], count, moments[:2], moments[2:]


def _total(limbs: Tensor) -> Tensor:
    """Sum limbs `[places, L, K]`, and undo their scaling."""
    middle, step = len(limbs) // 2, POWERS[0] - POWERS[1]
    powers = [2.0 ** (step * (place - middle)) for place in range(len(limbs))]
    return torch.tensor(powers, dtype=torch.float64) @ limbs.sum(dim=1)


def _shares(left: Tensor, whole: Tensor, count: Tensor) -> Tensor:
    """Compute `1 - left / whole`; where `whole` is 0, use 1 if `left` is 0, else 0."""
    nothing = left.eq(0).to(torch.float64)
    shares = torch.where(whole.ne(0), left.div(whole).neg().add(1.0), nothing)
    return shares + 0.0 / count  # NaN if nothing was counted


def _ranks(values: Tensor) -> Tensor:
    """Rank values in ascending order from 1; equal values get their mean rank."""
    _, place, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).to(torch.float64)
    return (last - (counts - 1).to(torch.float64) / 2)[place]
