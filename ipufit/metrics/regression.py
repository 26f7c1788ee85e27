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

from .base import Metric, is_binary, matched_targets, mean_sums

SMALLEST = 1e-7
"""The smallest number that percentages divide by, as in Keras."""

__all__ = ["CosineSimilarity", "RootMeanSquaredError"]


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the square of each difference.

    Args:
        outputs: Numbers of any shape.
        targets: Numbers of the same shape, up to axes of size 1.

    Example:
        >>> squared_error(torch.tensor([3.0]), torch.tensor([1.0]))
        tensor([4.])
    """
    return torch.square(_difference(outputs, targets))


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
    return torch.square(torch.log1p(predicted).sub(torch.log1p(true)))


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
    return size.add(torch.log1p(torch.exp(size.mul(-2.0)))).sub(math.log(2.0))


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


class RootMeanSquaredError(Metric):
    """The root of the mean of the squared differences.

    Args:
        name: Key in logs.

    Example:
        >>> metric = RootMeanSquaredError()
        >>> sums = metric.sums(torch.tensor([3.0, 5.0]), torch.tensor([0.0, 1.0]))
        >>> round(metric.result(sums.double()), 4)
        3.5355
    """

    direction = "min"

    def __init__(self, name: str = "root_mean_squared_error") -> None:
        super().__init__(name)

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return the sum and the number of the squares."""
        return mean_sums(squared_error(outputs, targets), weights)

    def result(self, sums: Tensor) -> float:
        """Return the root of the mean square."""
        return float(torch.sqrt(sums[0] / sums[1]))


class CosineSimilarity(Metric):
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

    def __init__(self, name: str = "cosine_similarity") -> None:
        super().__init__(name)

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return the sum and the number of the cosines."""
        if is_binary(outputs) or outputs.shape != targets.shape:
            raise DataError(
                "cosine_similarity compares vectors along the last axis: outputs and "
                "targets have one shape [samples, ..., size], not "
                f"{tuple(outputs.shape)} and {tuple(targets.shape)}."
            )
        true = _unit(matched_targets(outputs, targets))
        cosines = _unit(outputs.to(torch.float32)).mul(true).sum(dim=-1)
        return mean_sums(cosines, weights)


def _difference(outputs: Tensor, targets: Tensor) -> Tensor:
    true = matched_targets(outputs, targets)
    return torch.sub(outputs.to(torch.float32), true)


def _unit(vectors: Tensor) -> Tensor:
    """Scale vectors, along the last axis, to length 1."""
    square = torch.square(vectors).sum(dim=-1, keepdim=True)
    return vectors.div(torch.sqrt(square).clamp(min=1e-12))
