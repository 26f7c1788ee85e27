# SPDX-License-Identifier: Apache-2.0
"""Resolves the losses and metrics of `compile()` to an objective."""

from __future__ import annotations

from typing import Any, Sequence

from ipufit.errors import ConfigError, UnsupportedError
from ipufit.losses import Loss, resolve_loss
from ipufit.metrics import Metric, StreamedMetric, listed_metrics, resolve_metrics

from .objective import Measure, Objective
from .parts import OutputKey
from .steps import Steps


def resolve_objective(
    loss: Any,
    loss_weights: Any = None,
    metrics: Any = None,
    weighted_metrics: Any = None,
    steps: Steps | None = None,
) -> Objective:
    """Resolve the losses and metrics that `compile()` was given.

    Args:
        loss: A name, module or function; a list or dict of them, or None, per output;
            None if the module returns its own loss.
        loss_weights: Numbers, a list or dict of them per output.
        metrics: Names, metrics and functions in a list, or such lists per output in
            a list or dict.
        weighted_metrics: The same, for those that sample weights count in.
        steps: Functions that compute the loss in the place of the module.

    Raises:
        ConfigError: A loss, metric or weight is of an unusable type or number.
        UnknownNameError: A name stands for no loss or metric.
        UnsupportedError: Some losses add over samples, and some average.

    Example:
        >>> objective = resolve_objective("mse", None, ["mae", "mae"])
        >>> [measure.name for measure in objective.measures]
        ['mae', 'mae_1']
    """
    losses = tuple(
        (key, resolve_loss(item)) for key, item in _per_output(loss) if item is not None
    )
    if loss is not None and not losses:
        raise ConfigError(f"loss={loss!r} has no loss in it.")
    if len({item.is_sum for _, item in losses}) > 1:
        raise UnsupportedError(
            "Some losses add over samples (reduction='sum') and some average: the "
            "gradients of an update are either added or averaged. Use one kind."
        )
    measures: list[Measure] = []
    for given, is_weighted in ((metrics, False), (weighted_metrics, True)):
        for key, items in _metrics_per_output(given):
            taken = {m.name for m in measures if m.output == key}
            listed = listed_metrics(items)
            resolved = resolve_metrics([item for _, item in listed])
            length = len(items) if isinstance(items, (list, tuple)) else 1
            for (position, item), (name, metric) in zip(listed, resolved.items()):
                full = f"weighted_{name}" if is_weighted and name in taken else name
                listed_at = (position, length) if _is_about_one(item) else None
                measures.append(
                    Measure(key, full, metric, is_weighted, listed_at, item)
                )
    num_listed = len(loss) if isinstance(loss, (list, tuple)) else None
    weights = _weights(loss_weights, losses)
    return Objective(losses, weights, tuple(measures), num_listed, steps)


def _per_output(loss: Any) -> list[tuple[OutputKey, Any]]:
    if isinstance(loss, dict):
        return list(loss.items())
    if isinstance(loss, (list, tuple)):
        return list(enumerate(loss))
    return [(None, loss)]


def _metrics_per_output(metrics: Any) -> list[tuple[OutputKey, Any]]:
    if isinstance(metrics, dict):
        return list(metrics.items())
    is_nested = isinstance(metrics, (list, tuple)) and any(
        isinstance(item, (list, tuple, type(None))) for item in metrics
    )
    return list(enumerate(metrics)) if is_nested else [(None, metrics)]


def _is_about_one(item: Any) -> bool:
    """Whether a metric is about one output: all but functions of the user's."""
    return isinstance(item, (str, Metric, StreamedMetric)) or hasattr(item, "compute")


def _weights(
    loss_weights: Any, losses: Sequence[tuple[OutputKey, Loss]]
) -> dict[OutputKey, float]:
    if loss_weights is None:
        return {}
    if isinstance(loss_weights, dict):
        weights: dict[OutputKey, float] = dict(loss_weights)
    elif isinstance(loss_weights, (list, tuple)):
        weights = dict(enumerate(loss_weights))
    else:
        weights = {None: loss_weights}
    for key, weight in weights.items():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight < float("inf"):
            raise ConfigError(
                f"loss_weights has {weight!r} for {key!r}: use numbers of 0 or more."
            )
    keys = [key for key, _ in losses]
    strangers = [key for key in weights if key not in keys]
    if strangers and keys != [None]:
        raise ConfigError(
            f"loss_weights has {strangers[0]!r}, for which there is no loss. Losses "
            f"are given for {', '.join(map(repr, keys))}."
        )
    return weights
