# SPDX-License-Identifier: Apache-2.0
"""Metrics of torchmetrics, recognized by their methods without an import."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ipufit._tree import tree_map
from ipufit.errors import UnsupportedError

from .base import IGNORED_INDEX, StreamedMetric, is_like, rows_of, snake_case
from .streamed import kept_rows, one_number

_DIRECTIONS = {True: "max", False: "min"}


class TorchMetric(StreamedMetric):
    """A metric object of torchmetrics, on the host.

    The object gets the types that it expects: float32 for half precision, and int64 for
    integers. Outputs with one number per sample get the shape of their targets. Rows of
    weight 0 are left out; other weights are refused. An `ignore_index` of None becomes
    -100.

    Args:
        metric: The object of torchmetrics. Only its `update`, `compute` and `reset` are
            called.
        name: Key in logs; None for the class's name in snake_case.

    Raises:
        UnsupportedError: `metric` has no `higher_is_better`.

    Example:
        >>> class Worst:
        ...     higher_is_better = False
        ...     def reset(self):
        ...         self.worst = 0.0
        ...     def update(self, outputs, targets):
        ...         self.worst = max(self.worst, float((outputs - targets).abs().max()))
        ...     def compute(self):
        ...         return torch.tensor(self.worst)
        >>> metric = TorchMetric(Worst())
        >>> metric.reset()
        >>> metric.update(torch.tensor([1.0, 5.0]), torch.tensor([1, 2]))
        >>> metric.name, metric.direction, metric.result()
        ('worst', 'min', 3.0)
    """

    def __init__(self, metric: Any, name: str | None = None) -> None:
        kind = type(metric).__name__
        if not hasattr(metric, "higher_is_better"):
            raise UnsupportedError(
                f"metrics contains a {kind}, which has update, compute and reset, but "
                "no higher_is_better as metrics of torchmetrics have. Set it to True, "
                "False or None."
            )
        super().__init__(name or snake_case(kind))
        self._metric = metric
        self._has_rows = False
        if getattr(metric, "ignore_index", 0) is None:
            self.ignore_index = IGNORED_INDEX
        self.direction = _DIRECTIONS.get(metric.higher_is_better)

    @property
    def torch_metric(self) -> Any:
        """The object of torchmetrics."""
        return self._metric

    def update(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> None:
        """Update the object with a batch, without rows of weight 0."""
        if weights is not None:
            outputs, targets = kept_rows(self.name, outputs, targets, weights)
        if not rows_of(outputs):
            return
        self._has_rows = True
        device = getattr(self._metric, "device", None)
        outputs, targets = tree_map(
            lambda leaf: _as_expected(leaf, device), _same_shape(outputs, targets)
        )
        if self.ignore_index is not None:
            self._metric.ignore_index = self.ignore_index
        self._metric.update(outputs, targets)

    def result(self) -> float:
        """Compute the object's value; NaN without samples."""
        if not self._has_rows:
            return float("nan")
        return one_number(self.name, self._metric.compute())

    def reset(self) -> None:
        """Reset the object."""
        self._has_rows = False
        self._metric.reset()


def is_torch_metric(item: Any) -> bool:
    """Return whether an object has the methods of torchmetrics's metrics.

    Example:
        >>> is_torch_metric({}), is_torch_metric(torch.nn.Linear(1, 1))
        (False, False)
    """
    methods = ("update", "compute", "reset")
    return not isinstance(item, type) and all(
        callable(getattr(item, name, None)) for name in methods
    )


def is_collection(item: Any) -> bool:
    """Return whether an object is a `MetricCollection` of torchmetrics.

    Example:
        >>> is_collection(torch.nn.ModuleDict())
        False
    """
    return isinstance(item, torch.nn.ModuleDict) and hasattr(item, "compute_groups")


def members_of(item: Any) -> list[Any]:
    """Return the metrics of a `MetricCollection`, with the names of its `compute`.

    Each metric is updated by itself, even in a compute group. torchmetrics groups
    metrics whose states agree after the first batch. If they agree by chance, all of
    them would have the value of the first.

    Args:
        item: A collection, or any other object, which is returned in a list.

    Example:
        >>> members_of("accuracy")
        ['accuracy']
    """
    if not is_collection(item):
        return [item]
    return [TorchMetric(part, name) for name, part in item.items(copy_state=False)]


def _same_shape(outputs: Any, targets: Any) -> tuple[Any, Any]:
    """Leave out axes of size 1 that only one of outputs and targets has."""
    are_tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    if not are_tensors or outputs.dim() == targets.dim():
        return outputs, targets
    if not is_like(outputs.shape, targets.shape):
        return outputs, targets
    shape = min(outputs.shape, targets.shape, key=len)
    return outputs.reshape(shape), targets.reshape(shape)


def _as_expected(leaf: Any, device: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach()
    if device is not None:
        leaf = leaf.to(device)
    if leaf.dtype in (torch.float16, torch.bfloat16):
        return leaf.to(torch.float32)
    is_integer = not leaf.dtype.is_floating_point and leaf.dtype != torch.bool
    return leaf.to(torch.int64) if is_integer else leaf
