# SPDX-License-Identifier: Apache-2.0
"""The loss and the metrics of a model, summed up together."""

from __future__ import annotations

from typing import Any, Callable, Sequence, Union

import torch
from torch import Tensor

from ipufit.errors import ConfigError, UnknownNameError
from ipufit.types import Logs

from .base import FunctionMetric, Metric
from .classification import (
    accuracy,
    binary_accuracy,
    categorical_accuracy,
    sparse_categorical_accuracy,
)
from .regression import absolute_error, squared_error

MetricLike = Union[str, Metric, Callable[[Any, Any], Tensor]]
"""A name, a `Metric`, or `function(outputs, targets)`."""

_NAMED: dict[str, Callable[[Any, Any], Tensor]] = {
    "acc": accuracy,
    "accuracy": accuracy,
    "binary_accuracy": binary_accuracy,
    "categorical_accuracy": categorical_accuracy,
    "mae": absolute_error,
    "mean_absolute_error": absolute_error,
    "mean_squared_error": squared_error,
    "mse": squared_error,
    "sparse_categorical_accuracy": sparse_categorical_accuracy,
}


def resolve_metrics(
    metrics: MetricLike | Sequence[MetricLike] | None,
) -> dict[str, Metric]:
    """Find the metrics behind names and functions, each under a name of its own.

    Args:
        metrics: Names, metrics, functions; None for none. Names that clash are
            numbered: `mae`, `mae_1`.

    Returns:
        The metrics by name.

    Raises:
        UnknownNameError: A name is unknown.
        ConfigError: One is neither name, metric nor function.

    Example:
        >>> list(resolve_metrics(["accuracy", "mae", "mae"]))
        ['accuracy', 'mae', 'mae_1']
    """
    if isinstance(metrics, (str, Metric)) or callable(metrics):
        metrics = [metrics]
    if not isinstance(metrics, (tuple, list, type(None))):
        raise ConfigError(
            f"metrics={metrics!r} is not a list of names, ipufit.Metric objects and "
            "functions."
        )
    resolved: dict[str, Metric] = {}
    for item in metrics or ():
        metric = _resolve(item)
        name, number = metric.name, 0
        while name in resolved or name == "loss":
            number += 1
            name = f"{metric.name}_{number}"
        resolved[name] = metric
    return resolved


def _resolve(item: Any) -> Metric:
    if isinstance(item, str):
        if item not in _NAMED:
            raise UnknownNameError("metric", item, _NAMED)
        return FunctionMetric(item, _NAMED[item])
    if isinstance(item, Metric):
        return item
    if callable(item):
        name = getattr(item, "__name__", type(item).__name__)
        return FunctionMetric("lambda" if name == "<lambda>" else name, item)
    raise ConfigError(
        f"metrics contains {item!r}: use names ({', '.join(sorted(_NAMED))}), "
        "ipufit.Metric objects, or functions of outputs and targets."
    )


class MetricCollection:
    """The figures of a model: how a batch adds to them, and what they come to.

    The sums of a batch are one float32 vector: loss total and samples, then total
    and count of each metric. Running sums are float64, on the host.

    Args:
        metrics: The figures besides the loss, by name.
    """

    def __init__(self, metrics: dict[str, Metric]) -> None:
        self._metrics = dict(metrics)
        self.reset()

    @property
    def names(self) -> list[str]:
        """The keys of the logs."""
        return ["loss", *self._metrics]

    def vector(
        self, loss_total: Tensor, outputs: Any, targets: Any, rows: int
    ) -> Tensor:
        """The sums of a batch; traceable.

        Args:
            loss_total: The loss added up over the batch, 0-d.
            outputs: The model's.
            targets: Theirs.
            rows: Samples in the batch.

        Returns:
            `[2 * (1 + number of metrics)]`, float32, without gradients.
        """
        loss = loss_total.detach().to(torch.float32)
        parts = [loss, torch.full_like(loss, float(rows))]
        for metric in self._metrics.values():
            parts.extend(metric.sums(outputs, targets))
        return torch.stack([part.detach().to(torch.float32) for part in parts])

    def add(self, sums: Tensor) -> None:
        """Add vectors of sums, `[..., 2 * figures]`."""
        rows = sums.detach().to(torch.float64).reshape(-1, self._sums.numel())
        self._sums += rows.sum(dim=0)

    def reset(self) -> None:
        """Begin anew."""
        self._sums = torch.zeros(2 * len(self.names), dtype=torch.float64)

    def logs(self, prefix: str = "") -> Logs:
        """The figures so far, by name in alphabetical order, as Keras has them.

        Args:
            prefix: Put before each name.

        Returns:
            Names to values; NaN where nothing was counted.
        """
        values = (self._sums[0::2] / self._sums[1::2]).tolist()
        logs = {prefix + name: value for name, value in zip(self.names, values)}
        return dict(sorted(logs.items()))

    @property
    def samples(self) -> int:
        """Samples the figures cover."""
        return int(self._sums[1])
