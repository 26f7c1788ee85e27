# SPDX-License-Identifier: Apache-2.0
"""Find metrics by name, and convert objects, classes and functions to metrics.

The table here maps each name to a class, or to a function of outputs and targets.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Callable, Sequence, Union

from torch import Tensor

from ipufit._arguments import shown
from ipufit.errors import (
    ConfigError,
    UnknownNameError,
    UnsupportedError,
    refuse_foreign,
)

from . import classification, confusion, correlation, probabilistic, ranking
from . import regression as errors
from .base import FunctionMetric, Metric, StreamedMetric
from .torchmetrics_adapter import (
    TorchMetric,
    is_collection,
    is_torch_metric,
    members_of,
)

AnyMetric = Union[Metric, StreamedMetric]
"""A metric of either kind."""

MetricLike = Union[str, Metric, StreamedMetric, Callable[[Any, Any], Tensor]]
"""A name, a metric, a metric or collection of torchmetrics, or
`function(outputs, targets)`."""

_METRICS: dict[str, Callable[..., Any]] = {
    "acc accuracy": classification.Accuracy,
    "auc": ranking.AUC,
    "average_precision": ranking.AveragePrecision,
    "balanced_accuracy": confusion.BalancedAccuracy,
    "bce binary_crossentropy": probabilistic.BinaryCrossentropy,
    "binary_accuracy": classification.BinaryAccuracy,
    "categorical_accuracy": classification.CategoricalAccuracy,
    "categorical_crossentropy": probabilistic.CategoricalCrossentropy,
    "categorical_hinge": classification.CategoricalHinge,
    "ce crossentropy": probabilistic.CrossEntropy,
    "cosine_similarity": errors.CosineSimilarity,
    "dice f1 f1_score": confusion.F1Score,
    "exact_auc": ranking.ExactAUC,
    "explained_variance": correlation.ExplainedVariance,
    "false_negatives": confusion.FalseNegatives,
    "false_positives": confusion.FalsePositives,
    "fbeta_score": confusion.FBetaScore,
    "hinge": classification.Hinge,
    "huber smooth_l1": errors.huber_error,
    "iou": confusion.IoU,
    "kl_div kl_divergence": probabilistic.KLDivergence,
    "l1 mae mean_absolute_error": errors.absolute_error,
    "log_cosh": errors.log_cosh_error,
    "mape mean_absolute_percentage_error": errors.absolute_percentage_error,
    "mean_iou": confusion.MeanIoU,
    "mean_squared_error mse": errors.MeanSquaredError,
    "mean_squared_logarithmic_error msle": errors.squared_logarithmic_error,
    "nll nll_loss": probabilistic.NegativeLogLikelihood,
    "pearson pearson_correlation": correlation.PearsonCorrelation,
    "perplexity": probabilistic.Perplexity,
    "poisson": probabilistic.Poisson,
    "pr_auc": functools.partial(ranking.AUC, curve="PR"),
    "precision": confusion.Precision,
    "r2 r2_score": correlation.R2Score,
    "recall": confusion.Recall,
    "rmse root_mean_squared_error": errors.RootMeanSquaredError,
    "sparse_categorical_accuracy": classification.SparseCategoricalAccuracy,
    "sparse_categorical_crossentropy": probabilistic.SparseCategoricalCrossentropy,
    "sparse_top_k_categorical_accuracy": classification.SparseTopKCategoricalAccuracy,
    "spearman spearman_correlation": correlation.SpearmanCorrelation,
    "specificity": confusion.Specificity,
    "squared_hinge": functools.partial(
        classification.Hinge, function=classification.squared_hinge
    ),
    "top_k_categorical_accuracy": classification.TopKCategoricalAccuracy,
    "true_negatives": confusion.TrueNegatives,
    "true_positives": confusion.TruePositives,
}
"""Classes by name; or functions of outputs and targets whose mean is the metric."""


def _key(name: str) -> str:
    """Normalize a name: `mean_iou` and `MeanIoU` are the same."""
    return name.lower().replace("_", "")


_BY_KEY = {_key(n): metric for names, metric in _METRICS.items() for n in names.split()}
_TOP_K = re.compile(r"top_?(\d+)_?accuracy", re.IGNORECASE)


def metric_names() -> list[str]:
    """List the names of metrics; `top_<k>_accuracy` exists for any other k too.

    Capitals and underscores make no difference: "AUC", "MeanIoU", "cross_entropy".

    Example:
        >>> "f1_score" in metric_names()
        True
    """
    return [*sorted(" ".join(_METRICS).split()), "top_5_accuracy"]


def resolve_metric(item: Any) -> AnyMetric:
    """Return the metric for a name, an object or a function.

    Args:
        item: A name of `metric_names`, which becomes the key in logs as it is written;
            a metric, or its class if all settings have defaults; an object of
            torchmetrics; or `function(outputs, targets)`.

    Raises:
        UnknownNameError: The name is unknown.
        UnsupportedError: `item` is a collection of metrics.
        ConfigError: `item` is something else.

    Example:
        >>> resolve_metric("AUC").name, resolve_metric("acc").direction
        ('AUC', 'max')
    """
    if isinstance(item, str):
        return _named(item)
    names = " ".join(_METRICS).split()
    refuse_foreign("metrics", item, "a class in ipufit.metrics", names)
    if isinstance(item, type):
        return _instance(item)
    if isinstance(item, (Metric, StreamedMetric)):
        return item
    if is_collection(item):
        raise UnsupportedError(
            f"A {type(item).__name__} has several metrics: resolve_metrics takes it."
        )
    if is_torch_metric(item):
        return TorchMetric(item)
    if callable(item):
        return _function_metric(item)
    raise ConfigError(
        f"metrics contains {shown(item)}: use names ({', '.join(metric_names())}), "
        "metrics of ipufit or torchmetrics, or functions of outputs and targets."
    )


def resolve_metrics(
    metrics: MetricLike | Sequence[MetricLike] | None,
) -> dict[str, AnyMetric]:
    """Return metrics by unique names.

    Args:
        metrics: An item for `resolve_metric`, or several; or collections of
            torchmetrics; or None. Names that clash are numbered, as in Keras: `mae`,
            `mae_1`.

    Raises:
        UnknownNameError: A name is unknown.
        ConfigError: An item isn't a metric, or a streamed metric occurs twice.

    Example:
        >>> list(resolve_metrics(["accuracy", "mae", "mae"]))
        ['accuracy', 'mae', 'mae_1']
    """
    resolved: dict[str, AnyMetric] = {}
    seen: list[Any] = []
    for _, item in listed_metrics(metrics):
        metric = resolve_metric(item)
        if isinstance(metric, StreamedMetric):
            item = metric.torch_metric if isinstance(metric, TorchMetric) else item
            if any(item is other for other in seen if not isinstance(other, str)):
                raise ConfigError(
                    f"metrics contains {metric.name!r} twice, as one object, which "
                    "would be updated twice: make two objects."
                )
            seen.append(item)
        name, number = metric.name, 0
        while name in resolved or name == "loss":
            number += 1
            name = f"{metric.name}_{number}"
        resolved[name] = metric
    return resolved


def listed_metrics(metrics: Any) -> list[tuple[int, Any]]:
    """List metrics, also those inside collections.

    Args:
        metrics: As for `resolve_metrics`.

    Returns:
        Each metric with its index in `metrics`; members of a collection have the index
        of the collection.

    Raises:
        ConfigError: `metrics` is neither a metric nor a list.

    Example:
        >>> listed_metrics(["mae", "mse"])
        [(0, 'mae'), (1, 'mse')]
    """
    is_name_or_metric = isinstance(metrics, (str, Metric, StreamedMetric))
    if is_name_or_metric or callable(metrics) or is_torch_metric(metrics):
        metrics = [metrics]
    if not isinstance(metrics, (tuple, list, type(None))):
        raise ConfigError(
            f"metrics={shown(metrics)} is not a list of names, metrics and functions."
        )
    return [
        (position, member)
        for position, item in enumerate(metrics or ())
        for member in members_of(item)
    ]


def _named(name: str) -> AnyMetric:
    metric = _BY_KEY.get(_key(name))
    if isinstance(metric, (type, functools.partial)):
        return metric(name=name)
    if metric is not None:
        return FunctionMetric(name, metric, "min")
    top_k = _TOP_K.fullmatch(name)
    if top_k is not None:
        return classification.TopKAccuracy(int(top_k.group(1)), name=name)
    raise UnknownNameError("metric", name, metric_names())


def _instance(kind: type) -> AnyMetric:
    if issubclass(kind, (Metric, StreamedMetric)):
        make: Callable[[], AnyMetric] = kind
        try:
            return make()
        except TypeError as error:
            raise ConfigError(
                f"metrics contains the class {kind.__name__}, which can't be made "
                f"without settings: {error}"
            ) from error
    raise ConfigError(
        f"metrics contains the class {kind.__name__}: pass an object, "
        f"{kind.__name__}(...)."
    )


def _function_metric(function: Callable[[Any, Any], Tensor]) -> FunctionMetric:
    named: Any = function
    while isinstance(named, functools.partial):
        named = named.func
    name = getattr(named, "__name__", type(named).__name__)
    return FunctionMetric("lambda" if name == "<lambda>" else name, function)
