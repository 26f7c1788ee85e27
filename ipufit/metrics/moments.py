# SPDX-License-Identifier: Apache-2.0
"""Sums of numbers and of their products, exact enough for variances.

If numbers are far from 0, a variance is the small difference of large sums. So the
numbers of each batch are centred around a value of few digits, whose products are
exact. Each sum is split into limbs: multiples of fixed powers of 2. They have so few
digits that adding batches in float32 on a device rounds nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import weighed

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
    limbs: Tensor = torch.stack(
        [
            _limbs(_exact(weights.sum(dim=0), x_centre * y_centre)),
            _limbs(_exact(weighed(y_away, weights).sum(dim=0), x_centre)),
            _limbs(_exact(weighed(x_away, weights).sum(dim=0), y_centre)),
            _limbs([weighed(x_away * y_away, weights).sum(dim=0)]),
        ]
    ).sum(dim=0)
    return limbs


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
        limb = torch.trunc(rests.div(unit)).mul(unit)
        limbs.append(limb.sum(dim=0))
        rests = rests.sub(limb)
    return torch.stack([*limbs, rests.sum(dim=0)])


def _few_digits(values: Tensor) -> Tensor:
    """Round values to the first 8 of their 24 binary digits (Veltkamp)."""
    large = values * (2.0**16 + 1.0)
    rounded: Tensor = large - (large - values)
    return rounded
