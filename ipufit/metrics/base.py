# SPDX-License-Identifier: Apache-2.0
"""What a metric is: sums over samples, and what they come to.

A training program computes the sums of each micro-batch on the device and adds them
up there, so that exact figures over all samples cost a few scalars per call. The same
functions work on the host for `evaluate`. What is no function of sums is computed on
the host from streamed outputs: a `StreamedMetric`.
"""

from __future__ import annotations

import abc
from typing import Any, Callable

import torch
from torch import Tensor

from ipufit.errors import DataError


class Metric(abc.ABC):
    """Base of metrics that are functions of sums over samples or elements.

    Args:
        name: Its key in logs and History.

    Attributes:
        direction: `"max"` or `"min"` if more or less of it is better, else None; what
            callbacks go by that monitor it.
    """

    direction: str | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    @abc.abstractmethod
    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """What a batch adds, with operations that a device can trace.

        Args:
            outputs: The model's, rows first.
            targets: Theirs.
            weights: How much each row counts, `[rows]`, or each of its first
                positions, `[rows, ...]`; rows that shall not count have 0. None if all
                count alike.

        Returns:
            Numbers that may be added over batches: 1-d float32, of one length always.
        """

    def result(self, sums: Tensor) -> float:
        """What the sums come to.

        Args:
            sums: Added over all batches, float64; all zero if there was none.

        Returns:
            The figure; here the quotient of the first two, NaN of nothing.
        """
        return float(sums[0] / sums[1])


class StreamedMetric(abc.ABC):
    """Base of metrics that need the outputs themselves, on the host.

    A training program then returns the outputs of every micro-batch; a metric that is
    a function of sums is much cheaper.

    Args:
        name: Its key in logs and History.

    Attributes:
        direction: As of `Metric`.
    """

    direction: str | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    @abc.abstractmethod
    def update(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> None:
        """Take in a batch: real rows only, `weights` as of `Metric.sums`."""

    @abc.abstractmethod
    def result(self) -> float:
        """The figure over all batches since `reset`."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Begin anew."""


class FunctionMetric(Metric):
    """The mean of a plain function over samples or elements.

    Args:
        name: Its key in logs and History.
        function: `function(outputs, targets)`. Gives one value per sample or element,
            or one for the batch, which counts as the mean over its samples.
        direction: As of `Metric`.

    Example:
        >>> def bias(outputs, targets):
        ...     return outputs - targets
        >>> FunctionMetric("bias", bias).sums(torch.ones(2, 1), torch.zeros(2, 1))
        tensor([2., 2.])
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Any, Any], Tensor],
        direction: str | None = None,
    ) -> None:
        super().__init__(name)
        self.function = function
        self.direction = direction

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Total and number of values, both weighted."""
        values = self.function(outputs, targets)
        if not isinstance(values, Tensor):
            raise DataError(
                f"Metric {self.name!r} gives {values!r}, which is no tensor. A device "
                "traces metrics: compute with torch's operations, without .item() or "
                ".numpy(), or write an ipufit.StreamedMetric."
            )
        if values.dim() == 0 and weights is not None:
            raise DataError(
                f"Metric {self.name!r} gives one value for the whole batch, so its "
                "rows can't be weighted. Let it return one value per sample."
            )
        rows = rows_of(outputs if values.dim() == 0 else values)
        return mean_sums(values, weights, rows)


def mean_sums(values: Tensor, weights: Tensor | None = None, rows: int = 1) -> Tensor:
    """Total and count of values, for a mean.

    Args:
        values: One per sample, position or element, `[rows, ...]`; or a mean over
            `rows`, 0-d.
        weights: `[rows]` or `[rows, ...]`, over the first axes of `values`.
        rows: How many a 0-d value stands for.

    Returns:
        `[total, count]`, float32.

    Example:
        >>> mean_sums(torch.tensor([3.0, 5.0]), torch.tensor([1.0, 0.0]))
        tensor([3., 1.])
        >>> mean_sums(torch.tensor(0.5), rows=4)
        tensor([2., 4.])
    """
    values = in_float32(detached(values))
    if values.dim() == 0:
        # PopTorch gives a built-in loss that isn't the final one the shape [1].
        return _with_count(values.reshape(()).mul(rows), rows)
    if weights is None:
        return _with_count(values.sum(), values.numel())
    spread = spread_weights(weights, values)
    return torch.stack([weighed(values, spread).sum(), spread.sum()])


def _with_count(total: Tensor, count: int) -> Tensor:
    counted = torch.full_like(total, float(count), device=total.device)
    return torch.stack([total, counted])


def zeros_like(values: Tensor) -> Tensor:
    """Zeros of the shape and on the device of `values`.

    PopTorch warns of functions that make tensors if they aren't told a device.

    Example:
        >>> zeros_like(torch.ones(2))
        tensor([0., 0.])
    """
    return torch.zeros_like(values, device=values.device)


def detached(tensor: Tensor) -> Tensor:
    """A tensor without gradients; itself if it has none: one operation less."""
    return tensor.detach() if tensor.requires_grad else tensor


def in_float32(tensor: Tensor) -> Tensor:
    """A tensor in float32; itself if it is: one operation less."""
    return tensor if tensor.dtype == torch.float32 else tensor.to(torch.float32)


def flat(tensor: Tensor) -> Tensor:
    """A tensor in one dimension; itself if it is: one operation less."""
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def weighed(values: Tensor, weights: Tensor) -> Tensor:
    """Values times their weights; 0 where the weight is 0, even of NaN.

    Args:
        values: Float32.
        weights: Of the same shape.

    Returns:
        Of that shape.

    Example:
        >>> weighed(torch.tensor([3.0, float("nan")]), torch.tensor([2.0, 0.0]))
        tensor([6., 0.])
    """
    return torch.where(weights.eq(0), zeros_like(values), values.mul(weights))


def spread_weights(weights: Tensor, values: Tensor) -> Tensor:
    """Weights of rows as weights of every element of `values`.

    Args:
        weights: `[rows]` or `[rows, ...]`; axes of size 1 at its end don't count.
        values: Of at least as many axes.

    Returns:
        Float32, of the shape of `values`.

    Raises:
        DataError: They don't fit.

    Example:
        >>> spread_weights(torch.tensor([1.0, 0.0]), torch.zeros(2, 3)).sum()
        tensor(3.)
    """
    while weights.dim() > 1 and weights.shape[-1] == 1:
        weights = weights.squeeze(-1)
    missing = values.dim() - weights.dim()
    if missing < 0 or values.shape[: weights.dim()] != weights.shape:
        raise DataError(
            f"Sample weights of shape {tuple(weights.shape)} don't fit values of shape "
            f"{tuple(values.shape)}: give one weight per sample, or one per position."
        )
    shaped = weights.to(torch.float32).reshape(weights.shape + (1,) * missing)
    spread: Tensor = shaped.expand(values.shape)
    return spread


def rows_of(values: Any) -> int:
    """Samples in nested tensors whose dim 0 counts them.

    Example:
        >>> rows_of({"a": torch.zeros(3, 2)})
        3
    """
    while not isinstance(values, Tensor):
        values = next(iter(values.values() if isinstance(values, dict) else values))
    return int(values.shape[0])
