# SPDX-License-Identifier: Apache-2.0
"""Base classes of metrics.

A `Metric` is a function of sums over samples. A training program computes the sums of
each micro-batch and adds them up on the device, so that the exact value over all
samples costs a few scalars per call. `evaluate` runs the same functions. A
`StreamedMetric` is no function of sums: the host computes it from streamed outputs.
"""

from __future__ import annotations

import abc
import functools
import inspect
import math
from typing import Any, Callable

import torch
from torch import Tensor

from ipufit.errors import ConfigError, DataError

__all__ = [
    "FunctionMetric",
    "Metric",
    "StreamedMetric",
    "detached",
    "flat",
    "in_float32",
    "mean_sums",
    "outputs_first",
    "rows_of",
    "spread_weights",
]

_KERAS = ("update_state", "reset_state", "reset_states")


def _refuse_keras_words(kind: type) -> None:
    """Refuse a metric in Keras's words, of which nothing would be called.

    Raises:
        ConfigError: A class has a method of Keras's metrics.
    """
    found = [name for name in _KERAS if name in vars(kind)]
    if found:
        raise ConfigError(
            f"{kind.__name__} has {found[0]}, which is Keras's. An ipufit.Metric has "
            "sums(outputs, targets, weights), which are added over batches, and "
            "result(sums); an ipufit.StreamedMetric has update(outputs, targets, "
            "weights), result() and reset()."
        )


_TARGETS = {"label", "labels", "target", "targets", "true", "truth", "y_true"}


class Metric(abc.ABC):
    """Base of metrics that are functions of sums over samples or elements.

    Args:
        name: Key in logs and History.

    Attributes:
        direction: `"max"` or `"min"` if larger or smaller values are better, else None.
            Callbacks that monitor the metric use it.
        has_binary_loss: Whether the loss of the same output is binary, so that each
            output is a 0 or 1 of its own; None if unknown. It is set in copies of the
            metric.
    """

    direction: str | None = None
    has_binary_loss: bool | None = None
    _takes_one_hot = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse Keras's words."""
        super().__init_subclass__(**kwargs)
        _refuse_keras_words(cls)

    def __init__(self, name: str) -> None:
        self.name = name

    @abc.abstractmethod
    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Compute the sums of a batch, with operations that a device can trace.

        Args:
            outputs: Outputs of the model, one row per sample.
            targets: Targets, one row per sample.
            weights: Weight of each row, `[rows]`, or of each position, `[rows, ...]`.
                Rows of weight 0 are ignored. None weights all rows alike.

        Returns:
            1-d float32, of the same length for every batch. The sums of several
            batches are added up.
        """

    def result(self, sums: Tensor) -> float:
        """Compute the metric's value from sums.

        Args:
            sums: The results of `sums`, added over all batches, float64; zeros without
                batches.

        Returns:
            The value. In the base class it is the first sum divided by the second; NaN
            if the second is 0.
        """
        if self._takes_one_hot:
            refuse_parts(self.name, sums[1])
        return float(sums[0] / sums[1])


class StreamedMetric(abc.ABC):
    """Base of metrics that need the outputs themselves, on the host.

    A training program then returns the outputs of every micro-batch; a metric that is
    a function of sums is much cheaper.

    Args:
        name: Key in logs and History.

    Attributes:
        direction: `"max"`, `"min"` or None, as in `Metric`.
    """

    direction: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse Keras's words."""
        super().__init_subclass__(**kwargs)
        _refuse_keras_words(cls)

    def __init__(self, name: str) -> None:
        self.name = name

    @abc.abstractmethod
    def update(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> None:
        """Add a batch without padded rows; `weights` are as in `Metric.sums`."""

    @abc.abstractmethod
    def result(self) -> float:
        """Return the metric's value over all batches since `reset`."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Discard all batches."""


class CollectingMetric(StreamedMetric):
    """Base of streamed metrics that store each batch until the end.

    Args:
        name: Key in logs and History.

    Attributes:
        batches: One entry for each batch since `reset`, filled by `update`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.reset()

    def result(self) -> float:
        """Return the metric's value over all batches; NaN without batches."""
        return self._figure() if self.batches else float("nan")

    def reset(self) -> None:
        """Discard all batches."""
        self.batches: list[Any] = []

    @abc.abstractmethod
    def _figure(self) -> float:
        """Compute the metric's value from `batches`, at least one."""


class FunctionMetric(Metric):
    """Mean of a plain function over samples or elements.

    Args:
        name: Key in logs and History.
        function: `function(outputs, targets)`. Returns one value per sample or element,
            or one value for the batch, which counts as the mean over its samples.
        direction: `"max"`, `"min"` or None, as in `Metric`.

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
        self.function = outputs_first(function)
        self.direction = direction

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return the sum of the values and their number, both weighted."""
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


def outputs_first(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a function of outputs and targets, in this order, as torch has it.

    Keras has the other order. The name of the first parameter says which is meant.

    Example:
        >>> def pinball(y_true, y_pred):
        ...     return torch.maximum(0.9 * (y_true - y_pred), 0.1 * (y_pred - y_true))
        >>> outputs, targets = torch.tensor(1.0), torch.tensor(2.0)
        >>> outputs_first(pinball)(outputs, targets)
        tensor(0.9000)
    """
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of torch's functions in C++: outputs come first
        return function
    if len(names) < 2 or names[0] not in _TARGETS or names[1] in _TARGETS:
        return function

    return functools.partial(_with_targets_first, function)


def _with_targets_first(function: Any, outputs: Any, targets: Any) -> Any:
    return function(targets, outputs)


def refuse_parts(name: str, sums: Tensor) -> None:
    """Refuse the sums if some rows of the targets weren't one-hot.

    Raises:
        DataError: The sums are NaN.
    """
    if sums.isnan().any():
        raise DataError(
            f"The metric {name!r} takes targets of the outputs' shape for one-hot, "
            "with classes on the last axis, and some rows don't sum to 1. If each "
            "output has a 0 or 1 of its own, use a binary loss such as 'bce', metric "
            "'binary_accuracy', one such as ipufit.metrics.F1Score(multi_label=True), "
            "or masks with a channel axis, [N, 1, H, W]. If classes are on axis 1, "
            "give class indices."
        )


def mean_sums(values: Tensor, weights: Tensor | None = None, rows: int = 1) -> Tensor:
    """Return the sum of values and their number, for a mean.

    Args:
        values: One per sample, position or element, `[rows, ...]`; or a mean over
            `rows`, 0-d.
        weights: `[rows]` or `[rows, ...]`, over the first axes of `values`.
        rows: Number of samples that a 0-d value is the mean of.

    Returns:
        `[total, count]`, float32.

    Example:
        >>> mean_sums(torch.tensor([3.0, 5.0]), torch.tensor([1.0, 0.0]))
        tensor([3., 1.])
        >>> mean_sums(torch.tensor(0.5), rows=4)
        tensor([2., 4.])
    """
    values = in_float32(detached(values))
    if values.dim() and weights is not None:
        spread = spread_weights(weights, values)
        return torch.stack([weighed(values, spread).sum(), spread.sum()])
    if values.dim():
        total, count = values.sum(), values.numel()
    else:  # PopTorch gives a built-in loss that isn't the final one the shape [1]
        total, count = values.reshape(()).mul(rows), rows
    counts = torch.full_like(total, float(count), device=total.device)
    return torch.stack([total, counts])


def zeros_like(values: Tensor) -> Tensor:
    """Return zeros of the shape and on the device of `values`.

    PopTorch warns of functions that create tensors without a device argument.

    Example:
        >>> zeros_like(torch.ones(2))
        tensor([0., 0.])
    """
    return torch.zeros_like(values, device=values.device)


def detached(tensor: Tensor) -> Tensor:
    """Detach a tensor; one without gradients is returned itself."""
    return tensor.detach() if tensor.requires_grad else tensor


def in_float32(tensor: Tensor) -> Tensor:
    """Cast to float32; a float32 tensor is returned itself."""
    return tensor if tensor.dtype == torch.float32 else tensor.to(torch.float32)


def flat(tensor: Tensor) -> Tensor:
    """Flatten a tensor; a 1-d tensor is returned itself."""
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def weighed(values: Tensor, weights: Tensor) -> Tensor:
    """Multiply values by weights of the same shape; weight 0 gives 0, even for NaN.

    Example:
        >>> weighed(torch.tensor([3.0, float("nan")]), torch.tensor([2.0, 0.0]))
        tensor([6., 0.])
    """
    return torch.where(weights.eq(0), zeros_like(values), values.mul(weights))


def spread_weights(weights: Tensor, values: Tensor) -> Tensor:
    """Expand weights of rows to the shape of `values`, in float32.

    Args:
        weights: `[rows]` or `[rows, ...]`; axes of size 1 at the end are dropped.
        values: `[rows, ...]`, of at least as many axes.

    Raises:
        DataError: The shapes don't fit.

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
    """Return the number of samples in nested tensors: the size of their first axis.

    Example:
        >>> rows_of({"a": torch.zeros(3, 2)})
        3
    """
    while not isinstance(values, Tensor):
        values = next(iter(values.values() if isinstance(values, dict) else values))
    return int(values.shape[0])


def is_whole(value: Any, minimum: int) -> bool:
    """Return whether `value` is an int of at least `minimum`, and not a bool.

    Example:
        >>> is_whole(2, minimum=2), is_whole(True, minimum=0), is_whole(2.0, minimum=0)
        (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_between(value: Any, low: float, high: float) -> bool:
    """Return whether `value` is a number between `low` and `high`, and not a bool.

    Example:
        >>> is_between(0.5, 0, 1), is_between(1, 0, 1), is_between("0.5", 0, 1)
        (True, False, False)
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and low < value < high


def score_above(threshold: float, from_logits: bool) -> float:
    """Return the score above which a 1 is predicted: the threshold or its logit.

    Args:
        threshold: A probability.
        from_logits: Whether scores are logits; else they are probabilities.

    Raises:
        ConfigError: The threshold isn't between 0 and 1.

    Example:
        >>> score_above(0.5, from_logits=True)
        0.0
    """
    if not is_between(threshold, 0, 1):
        raise ConfigError(
            f"threshold={threshold!r}: use a probability between 0 and 1."
        )
    return math.log(threshold / (1 - threshold)) if from_logits else float(threshold)
