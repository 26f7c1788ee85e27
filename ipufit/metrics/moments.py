# SPDX-License-Identifier: Apache-2.0
"""Sums of numbers and of their products, as exact as variances need them.

A variance is the small difference of large sums if numbers are far from 0. So each
batch sums around a centre of few digits, whose products have no rounding error, and
gives every sum in limbs: multiples of fixed powers of 2, so few of each that adding
up batches in float32 on a device rounds nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import weighed

LIMBS = tuple(2.0**exponent for exponent in (36, 24, 12, 0, -12, -24))
"""What the limbs of a sum are multiples of; one more has the rest."""
NUM_LIMBS = len(LIMBS) + 1


def centred(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """A number near the mean of each column, and the distances from it.

    Args:
        values: `[N, K]`, float32.
        weights: `[N, K]`.

    Returns:
        `[K]`, with so few digits that its products are exact, and `[N, K]`.

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
    """The weighted sum of `x * y`, in limbs.

    Args:
        x: As `centred` gives it.
        y: The same of other values, or of those of `x`.
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
    """The weighted sum of values, in limbs.

    Args:
        x: As `centred` gives it.
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
    """The sum of the products of distances from the means.

    Args:
        x: The sum of one variable, float64 as all of these.
        y: That of the other, or the same.
        products: The sum of their products.
        count: Of weights.

    Returns:
        The co-moment; 0 where it can't be told from what rounding leaves, which is
        where numbers vary by less than 1e-5 of their mean.

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
    """Terms of a product with a factor of at most 16 digits, hardly rounded."""
    head = _few_digits(factor)
    return [head * short, (factor - head) * short]


def _limbs(terms: list[Tensor]) -> Tensor:
    """Terms as multiples of each of `LIMBS`, and the rest; added up limb by limb."""
    limbs, rests = [], torch.stack(terms)
    for unit in LIMBS:
        limb = torch.trunc(rests.div(unit)).mul(unit)
        limbs.append(limb.sum(dim=0))
        rests = rests.sub(limb)
    return torch.stack([*limbs, rests.sum(dim=0)])


def _few_digits(values: Tensor) -> Tensor:
    """Values rounded to the first 8 of their 24 binary digits (Veltkamp)."""
    large = values * (2.0**16 + 1.0)
    rounded: Tensor = large - (large - values)
    return rounded
