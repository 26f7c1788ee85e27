# SPDX-License-Identifier: Apache-2.0
"""Metrics of all outputs at once, computed on the host."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from ipufit._tree import tree_map
from ipufit.errors import DataError, UnsupportedError

from .base import CollectingMetric, outputs_first, unfit_weights


class StreamedFunction(CollectingMetric):
    """A function of all outputs and targets, such as scikit-learn's, on the host.

    Args:
        function: `function(outputs, targets)`, or `function(y_true, y_pred)` with its
            parameters named so, as scikit-learn's are. The function gets NumPy
            arrays with all rows, and returns one number.
        name: Key in logs; None for the function's name.
        direction: `"max"`, `"min"` or None, as in `StreamedMetric`.

    Example:
        >>> def worst(outputs, targets):
        ...     return abs(outputs - targets).max()
        >>> metric = StreamedFunction(worst, direction="min")
        >>> metric.update(torch.tensor([1.0, 5.0]), torch.tensor([1.0, 2.0]))
        >>> metric.name, metric.result()
        ('worst', 3.0)
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        name: str | None = None,
        direction: str | None = None,
    ) -> None:
        called = str(getattr(function, "__name__", "function"))
        super().__init__(called if name is None else name)
        self._function = outputs_first(function)
        self.direction = direction

    def _rows(self, outputs: Any, targets: Any, weights: Tensor | None) -> Any:
        """Return outputs and targets without rows of weight 0."""
        if weights is None:
            return outputs, targets
        return kept_rows(self.name, outputs, targets, weights)

    def _compute(self, *rows: Any) -> float:
        return one_number(
            self.name, self._function(*tree_map(torch.Tensor.numpy, rows))
        )


def kept_rows(
    name: str, outputs: Any, targets: Any, weights: Tensor
) -> tuple[Any, Any]:
    """Remove rows of weight 0.

    Args:
        name: Name of the metric, for messages.
        outputs: Outputs of the model, one row per sample.
        targets: Targets, one row per sample.
        weights: Weights of 0 and 1, `[rows]` or `[rows, ...]`.

    Returns:
        Outputs and targets of weight 1; their weighted axes become a single axis.

    Raises:
        UnsupportedError: Some weights are neither 0 nor 1.
        DataError: Outputs or targets don't have the weighted axes.

    Example:
        >>> kept_rows("f1", torch.tensor([1, 2]), torch.tensor([3, 4]), torch.eye(2)[1])
        (tensor([2]), tensor([4]))
    """
    is_kept = kept(name, weights)
    while is_kept.dim() > 1 and is_kept.shape[-1] == 1:
        is_kept = is_kept.squeeze(-1)

    def rows(leaf: Tensor) -> Tensor:
        if leaf.shape[: is_kept.dim()] != is_kept.shape:
            raise unfit_weights(weights, leaf)
        return leaf[is_kept]

    return tree_map(rows, (outputs, targets))


def kept(name: str, weights: Tensor) -> Tensor:
    """Return bools: True for weight 1, False for weight 0.

    Raises:
        UnsupportedError: Some weights are neither 0 nor 1.
    """
    is_kept = weights.ne(0)
    if torch.equal(weights, is_kept.to(weights.dtype)):
        return is_kept
    raise UnsupportedError(
        f"Metric {name!r} can leave rows out, but not weight them: sample weights "
        "must be 0 or 1. Put it in metrics instead of weighted_metrics."
    )


def one_number(name: str, value: Any) -> float:
    """Convert the result of a metric to a float.

    Args:
        name: Name of the metric, for messages.
        value: A number, or a tensor or array of one.

    Raises:
        DataError: `value` is something else.

    Example:
        >>> one_number("f1", torch.tensor([0.5]))
        0.5
    """
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"The metric {name!r} returns {value!r}, which isn't one number. Logs hold "
            "one number per metric: use an average, or a metric for each number."
        ) from None
