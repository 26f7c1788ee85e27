# SPDX-License-Identifier: Apache-2.0
"""A metric is a quotient of two sums over samples.

A training program computes the sums of each micro-batch on the device and adds them
up there, so that exact figures over all samples cost a few scalars per call. The same
functions work on the host for `evaluate`.

Metrics must not call torch's loss functions: PopTorch takes every one of them for a
loss to minimise.
"""

from __future__ import annotations

import abc
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor


class Sums(NamedTuple):
    """What a batch adds to a metric: `total / num_values` is its value.

    Attributes:
        total: 0-d float32.
        num_values: 0-d float32; how many samples or elements it adds up.
    """

    total: Tensor
    num_values: Tensor


class Metric(abc.ABC):
    """Base of metrics that are means over samples or elements.

    Args:
        name: Its key in logs and History.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abc.abstractmethod
    def sums(self, outputs: Any, targets: Any) -> Sums:
        """The sums of a batch, with operations that a device can trace.

        Args:
            outputs: The model's, rows first.
            targets: Theirs.

        Returns:
            Total and number of values.
        """


class FunctionMetric(Metric):
    """A metric made of a plain function.

    Args:
        name: Its key in logs and History.
        function: `function(outputs, targets)`. Gives one value per sample or element,
            or one for the batch, which counts as the mean over its samples.

    Example:
        >>> def bias(outputs, targets):
        ...     return outputs - targets
        >>> FunctionMetric("bias", bias).sums(torch.ones(2, 1), torch.zeros(2, 1))
        Sums(total=tensor(2.), num_values=tensor(2.))
    """

    def __init__(self, name: str, function: Callable[[Any, Any], Tensor]) -> None:
        super().__init__(name)
        self._function = function

    def sums(self, outputs: Any, targets: Any) -> Sums:
        """As the function says."""
        return sums_of(self._function(outputs, targets), rows_of(targets))


def sums_of(values: Tensor, rows: int) -> Sums:
    """Total and number of values per sample, or of a mean over `rows`.

    Example:
        >>> sums_of(torch.tensor(0.5), rows=4)
        Sums(total=tensor(2.), num_values=tensor(4.))
    """
    values = values.detach().to(torch.float32)
    if values.dim() == 0:
        return Sums(values.mul(rows), torch.full_like(values, float(rows)))
    total = values.sum()
    return Sums(total, torch.full_like(total, float(values.numel())))


def rows_of(values: Any) -> int:
    """Samples in nested tensors whose dim 0 counts them.

    Example:
        >>> rows_of({"a": torch.zeros(3, 2)})
        3
    """
    while not isinstance(values, Tensor):
        values = next(iter(values.values() if isinstance(values, dict) else values))
    return int(values.shape[0])
