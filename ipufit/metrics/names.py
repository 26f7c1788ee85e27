# SPDX-License-Identifier: Apache-2.0
"""From what users call a metric to the metric."""

from __future__ import annotations

from typing import Any, Callable, Sequence, Union

from torch import Tensor

from ipufit.errors import ConfigError, UnknownNameError

from .base import FunctionMetric, Metric, StreamedMetric
from .classification import (
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    SparseCategoricalAccuracy,
)
from .regression import absolute_error, squared_error

MetricLike = Union[str, Metric, StreamedMetric, Callable[[Any, Any], Tensor]]
"""A name, a metric, or `function(outputs, targets)`."""



def _mean(function: Callable[[Any, Any], Tensor]) -> Callable[[str], Metric]:
    return lambda name: FunctionMetric(name, function, "min")


_NAMED: dict[str, Callable[[str], Metric]] = {
    "acc": lambda name: Accuracy(name=name),
    "accuracy": lambda name: Accuracy(name=name),
    "binary_accuracy": lambda name: BinaryAccuracy(name=name),
    "categorical_accuracy": CategoricalAccuracy,
    "mae": _mean(absolute_error),
    "mean_absolute_error": _mean(absolute_error),
    "mean_squared_error": _mean(squared_error),
    "mse": _mean(squared_error),
    "sparse_categorical_accuracy": SparseCategoricalAccuracy,
}


def resolve_metrics(
    metrics: MetricLike | Sequence[MetricLike] | None,
) -> dict[str, Metric | StreamedMetric]:
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
    if isinstance(metrics, (str, Metric, StreamedMetric)) or callable(metrics):
        metrics = [metrics]
    if not isinstance(metrics, (tuple, list, type(None))):
        raise ConfigError(
            f"metrics={metrics!r} is not a list of names, ipufit.Metric objects and "
            "functions."
        )
    resolved: dict[str, Metric | StreamedMetric] = {}
    for item in metrics or ():
        metric = _resolve(item)
        name, number = metric.name, 0
        while name in resolved or name == "loss":
            number += 1
            name = f"{metric.name}_{number}"
        resolved[name] = metric
    return resolved


def _resolve(item: Any) -> Metric | StreamedMetric:
    if isinstance(item, str):
        if item not in _NAMED:
            raise UnknownNameError("metric", item, _NAMED)
        return _NAMED[item](item)
    if isinstance(item, (Metric, StreamedMetric)):
        return item
    if callable(item):
        name = getattr(item, "__name__", type(item).__name__)
        return FunctionMetric("lambda" if name == "<lambda>" else name, item)
    raise ConfigError(
        f"metrics contains {item!r}: use names ({', '.join(sorted(_NAMED))}), "
        "ipufit.Metric objects, or functions of outputs and targets."
    )
