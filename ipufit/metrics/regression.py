# SPDX-License-Identifier: Apache-2.0
"""Errors of predicted numbers.

The functions return a tensor of the outputs' shape, one error per element. The classes
average over all samples.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ipufit.errors import DataError

from .base import (
    MeanMetric,
    Metric,
    Weighted,
    Weights,
    is_binary,
    matched_targets,
    mean_sums,
    weights_like,
    zeros_like,
)
from .correlation import POWERS

SMALLEST = 1e-7
"""The smallest divisor of percentages, as in Keras."""


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the absolute value of each difference.

    Args:
        outputs: Numbers of any shape.
        targets: Numbers of the same shape, up to axes of size 1.

    Example:
        >>> absolute_error(torch.tensor([3.0]), torch.tensor([5.0]))
        tensor([2.])
    """
    return torch.abs(_difference(outputs, targets))


def absolute_percentage_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the absolute value of each difference in percent of the target.

    Args:
        outputs: Numbers of any shape.
        targets: Numbers of the same shape, up to axes of size 1.

    Example:
        >>> absolute_percentage_error(torch.tensor([3.0]), torch.tensor([4.0]))
        tensor([25.])
    """
    whole = torch.abs(matched_targets(outputs, targets)).clamp(min=SMALLEST)
    return torch.abs(_difference(outputs, targets)).div(whole).mul(100.0)


def squared_logarithmic_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the square of each difference of `log(1 + x)`; numbers below 0 count as 0.

    Args:
        outputs: Numbers of any shape.
        targets: Numbers of the same shape, up to axes of size 1.

    Example:
        >>> squared_logarithmic_error(torch.tensor([1.0]), torch.tensor([1.0]))
        tensor([0.])
    """
    true = matched_targets(outputs, targets).clamp(min=0.0)
    predicted = outputs.to(torch.float32).clamp(min=0.0)
    # The difference of two logarithms would lose the digits that they share.
    size = torch.abs(predicted.sub(true))
    ratio = size.div(torch.minimum(predicted, true).add(1.0))
    return torch.square(torch.log1p(ratio))


def log_cosh_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the logarithm of the hyperbolic cosine of each difference.

    Args:
        outputs: Numbers of any shape.
        targets: Numbers of the same shape, up to axes of size 1.

    Example:
        >>> log_cosh_error(torch.tensor([0.0]), torch.tensor([0.0]))
        tensor([0.])
    """
    size = torch.abs(_difference(outputs, targets))
    far = size.add(torch.log1p(torch.exp(size.mul(-2.0)))).sub(math.log(2.0))
    # Close to 0 this formula loses all digits; 1 / cosh^2 = 1 - tanh^2 doesn't.
    near = torch.log1p(torch.tanh(size.clamp(max=1.0)).square().neg()).mul(-0.5)
    return torch.where(size.lt(1.0), near, far)


def huber_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return torch's smooth L1: half the squared difference up to 1, linear beyond.

    Args:
        outputs: Numbers of any shape.
        targets: Numbers of the same shape, up to axes of size 1.

    Example:
        >>> huber_error(torch.tensor([1.0, 3.0]), torch.zeros(2))
        tensor([0.5000, 2.5000])
    """
    size = torch.abs(_difference(outputs, targets))
    near = size.clamp(max=1.0)
    return near.mul(size.sub(near.mul(0.5)))


class MeanSquaredError(Metric):
    """The mean of the squared differences, also where squares overflow float32.

    Squares of numbers above 1e19 are infinite in float32. So differences are multiplied
    by a power of 2 first, and each power has a sum of its own.

    Args:
        name: Key in logs.

    Example:
        >>> metric = MeanSquaredError()
        >>> sums = metric.sums(torch.tensor([3e20, 5e20]), torch.tensor([0.0, 1e20]))
        >>> f"{metric.result(sums.double()):.3g}"
        '1.25e+41'
    """

    direction = "min"
    _default_name = "mean_squared_error"

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return the sums of the squares by power, and their number."""
        values = _difference(outputs, targets)
        size = values.abs()
        is_small, is_large = size.lt(2.0**-32), size.gt(2.0**32)
        is_between = is_small.logical_or(is_large).logical_not()
        sums = []
        for power, is_here in zip(POWERS, (is_small, is_between, is_large)):
            squares = torch.square(values.mul(2.0**power))
            sums.append(mean_sums(squares.where(is_here, zeros_like(squares)), weights))
        totals, counts = torch.stack(sums).unbind(1)
        return torch.cat([totals, counts[:1]])

    def result(self, sums: Tensor) -> float:
        """Return the mean square."""
        totals = [total * 4.0**-power for total, power in zip(sums.tolist(), POWERS)]
        return float(sum(totals) / sums[-1])


class RootMeanSquaredError(MeanSquaredError):
    """The root of the mean of the squared differences.

    Args:
        name: Key in logs.

    Example:
        >>> metric = RootMeanSquaredError()
        >>> sums = metric.sums(torch.tensor([3.0, 5.0]), torch.tensor([0.0, 1.0]))
        >>> round(metric.result(sums.double()), 4)
        3.5355
    """

    _default_name = "root_mean_squared_error"

    def result(self, sums: Tensor) -> float:
        """Return the root of the mean square."""
        mean = torch.tensor(super().result(sums), dtype=torch.float64)
        return float(mean.sqrt())


class CosineSimilarity(MeanMetric):
    """The mean cosine of the angle between vectors, along the last axis.

    A vector of zeros has the similarity 0 to any vector.

    Args:
        name: Key in logs.

    Example:
        >>> metric = CosineSimilarity()
        >>> metric.sums(torch.eye(2), torch.ones(2, 2)).tolist()
        [1.41421..., 2.0]
    """

    direction = "max"
    _default_name = "cosine_similarity"

    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        if is_binary(outputs) or outputs.shape != targets.shape:
            raise DataError(
                "cosine_similarity compares vectors along the last axis: outputs and "
                "targets have one shape [samples, ..., size], not "
                f"{tuple(outputs.shape)} and {tuple(targets.shape)}."
            )
        true = _unit(matched_targets(outputs, targets))
        cosines = _unit(outputs.to(torch.float32)).mul(true).sum(dim=-1)
        return cosines, weights_like(cosines, weights)


def _difference(outputs: Tensor, targets: Tensor) -> Tensor:
    true = matched_targets(outputs, targets)
    return torch.sub(outputs.to(torch.float32), true)


def _unit(vectors: Tensor) -> Tensor:
    """Scale vectors, along the last axis, to length 1."""
    largest = vectors.abs().amax(dim=-1, keepdim=True)
    vectors = vectors.div(largest.clamp(min=1e-37))  # so that squares are finite
    square = torch.square(vectors).sum(dim=-1, keepdim=True)
    return vectors.div(torch.sqrt(square).clamp(min=1.0))
