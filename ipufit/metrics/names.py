# SPDX-License-Identifier: Apache-2.0
"""From what users call a metric to the metric."""

from __future__ import annotations

import functools
import re
from typing import Any, Callable, Sequence, Union

from torch import Tensor

from ipufit.errors import ConfigError, UnknownNameError

from . import classification, confusion, correlation, hinge, probabilistic, ranking
from . import regression as errors
from .base import FunctionMetric, Metric, StreamedMetric
from .torchmetrics_adapter import TorchMetric, is_torch_metric

AnyMetric = Union[Metric, StreamedMetric]
"""A metric of either kind."""

MetricLike = Union[str, Metric, StreamedMetric, Callable[[Any, Any], Tensor]]
"""A name, a metric, an object of torchmetrics, or `function(outputs, targets)`."""

Factory = Callable[[str], AnyMetric]


def _class(kind: Callable[..., AnyMetric], **settings: Any) -> Factory:
    return lambda name: kind(name=name, **settings)


def _error(function: Callable[[Any, Any], Tensor]) -> Factory:
    return lambda name: FunctionMetric(name, function, "min")


_FACTORIES: dict[str, Factory] = {
    "acc": _class(classification.Accuracy),
    "accuracy": _class(classification.Accuracy),
    "auc": _class(ranking.AUC),
    "average_precision": _class(ranking.AveragePrecision),
    "balanced_accuracy": _class(confusion.BalancedAccuracy),
    "bce": _class(probabilistic.BinaryCrossentropy),
    "binary_accuracy": _class(classification.BinaryAccuracy),
    "binary_crossentropy": _class(probabilistic.BinaryCrossentropy),
    "categorical_accuracy": _class(classification.CategoricalAccuracy),
    "categorical_crossentropy": _class(probabilistic.CategoricalCrossentropy),
    "categorical_hinge": _class(hinge.CategoricalHinge),
    "ce": _class(probabilistic.CrossEntropy),
    "cosine_similarity": _class(errors.CosineSimilarity),
    "crossentropy": _class(probabilistic.CrossEntropy),
    "exact_auc": _class(ranking.ExactAUC),
    "explained_variance": _class(correlation.ExplainedVariance),
    "f1": _class(confusion.F1Score),
    "f1_score": _class(confusion.F1Score),
    "false_negatives": _class(confusion.FalseNegatives),
    "false_positives": _class(confusion.FalsePositives),
    "fbeta_score": _class(confusion.FBetaScore),
    "hinge": _error(hinge.hinge),
    "huber": _error(errors.huber_error),
    "iou": _class(confusion.IoU),
    "kl_div": _class(probabilistic.KLDivergence),
    "kl_divergence": _class(probabilistic.KLDivergence),
    "l1": _error(errors.absolute_error),
    "log_cosh": _error(errors.log_cosh_error),
    "mae": _error(errors.absolute_error),
    "mape": _error(errors.absolute_percentage_error),
    "mean_absolute_error": _error(errors.absolute_error),
    "mean_absolute_percentage_error": _error(errors.absolute_percentage_error),
    "mean_iou": _class(confusion.MeanIoU),
    "mean_squared_error": _error(errors.squared_error),
    "mean_squared_logarithmic_error": _error(errors.squared_logarithmic_error),
    "mse": _error(errors.squared_error),
    "msle": _error(errors.squared_logarithmic_error),
    "nll": _class(probabilistic.NegativeLogLikelihood),
    "nll_loss": _class(probabilistic.NegativeLogLikelihood),
    "pearson": _class(correlation.PearsonCorrelation),
    "pearson_correlation": _class(correlation.PearsonCorrelation),
    "perplexity": _class(probabilistic.Perplexity),
    "poisson": _class(probabilistic.Poisson),
    "pr_auc": _class(ranking.AUC, curve="PR"),
    "precision": _class(confusion.Precision),
    "r2": _class(correlation.R2Score),
    "r2_score": _class(correlation.R2Score),
    "recall": _class(confusion.Recall),
    "rmse": _class(errors.RootMeanSquaredError),
    "root_mean_squared_error": _class(errors.RootMeanSquaredError),
    "smooth_l1": _error(errors.huber_error),
    "sparse_categorical_accuracy": _class(classification.SparseCategoricalAccuracy),
    "sparse_categorical_crossentropy": _class(
        probabilistic.SparseCategoricalCrossentropy
    ),
    "sparse_top_k_categorical_accuracy": _class(
        classification.SparseTopKCategoricalAccuracy
    ),
    "spearman": _class(correlation.SpearmanCorrelation),
    "spearman_correlation": _class(correlation.SpearmanCorrelation),
    "specificity": _class(confusion.Specificity),
    "squared_hinge": _error(hinge.squared_hinge),
    "top_k_categorical_accuracy": _class(classification.TopKCategoricalAccuracy),
    "true_negatives": _class(confusion.TrueNegatives),
    "true_positives": _class(confusion.TruePositives),
}


def _key(name: str) -> str:
    """A name without what spellings differ in: `mean_iou` and `MeanIoU` are one."""
    return name.lower().replace("_", "")


_BY_KEY = {_key(name): factory for name, factory in _FACTORIES.items()}
_TOP_K = re.compile(r"top_?(\d+)_?accuracy", re.IGNORECASE)


def metric_names() -> list[str]:
    """The names of metrics; besides them there is `top_<k>_accuracy` of any k.

    Capitals and underscores make no difference: "AUC", "MeanIoU", "cross_entropy".

    Example:
        >>> "f1_score" in metric_names()
        True
    """
    return [*_FACTORIES, "top_5_accuracy"]


def resolve_metric(item: Any) -> AnyMetric:
    """Find the metric behind a name, an object or a function.

    Args:
        item: One of `metric_names`, which becomes the key in logs as it's written; a
            metric, or its class if all settings have defaults; an object of
            torchmetrics; or `function(outputs, targets)`.

    Returns:
        The metric.

    Raises:
        UnknownNameError: The name is unknown.
        UnsupportedError: It's a collection of metrics.
        ConfigError: It's something else.

    Example:
        >>> resolve_metric("AUC").name, resolve_metric("acc").direction
        ('AUC', 'max')
    """
    if isinstance(item, str):
        return _named(item)
    if isinstance(item, type):
        return _instance(item)
    if isinstance(item, (Metric, StreamedMetric)):
        return item
    if is_torch_metric(item):
        return TorchMetric(item)
    if hasattr(item, "update_state"):
        raise ConfigError(
            f"metrics contains {item!r} of Keras, which computes with Keras's tensors. "
            "Use its name, such as 'auc', or the class in ipufit.metrics."
        )
    if callable(item):
        return _of_function(item)
    raise ConfigError(
        f"metrics contains {item!r}: use names ({', '.join(metric_names())}), metrics "
        "of ipufit or torchmetrics, or functions of outputs and targets."
    )


def resolve_metrics(
    metrics: MetricLike | Sequence[MetricLike] | None,
) -> dict[str, AnyMetric]:
    """Find metrics, each under a name of its own.

    Args:
        metrics: What `resolve_metric` takes, or several of it; None for none. Names
            that clash are numbered, as in Keras: `mae`, `mae_1`.

    Returns:
        The metrics by name.

    Raises:
        UnknownNameError: A name is unknown.
        UnsupportedError: One is a collection of metrics.
        ConfigError: One is no metric, or it is there twice and keeps a state.

    Example:
        >>> list(resolve_metrics(["accuracy", "mae", "mae"]))
        ['accuracy', 'mae', 'mae_1']
    """
    resolved: dict[str, AnyMetric] = {}
    seen: list[Any] = []
    for item in _listed(metrics):
        metric = resolve_metric(item)
        if isinstance(metric, StreamedMetric):
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


def _listed(metrics: Any) -> Sequence[Any]:
    is_one = isinstance(metrics, (str, Metric, StreamedMetric)) or callable(metrics)
    if is_one or is_torch_metric(metrics):
        return [metrics]
    if not isinstance(metrics, (tuple, list, type(None))):
        raise ConfigError(
            f"metrics={metrics!r} is not a list of names, metrics and functions."
        )
    return metrics or ()


def _named(name: str) -> AnyMetric:
    factory = _BY_KEY.get(_key(name))
    if factory is not None:
        return factory(name)
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
        f"metrics contains the class {kind.__name__}: give an object, "
        f"{kind.__name__}(...)."
    )


def _of_function(function: Callable[[Any, Any], Tensor]) -> FunctionMetric:
    named: Any = function
    while isinstance(named, functools.partial):
        named = named.func
    name = getattr(named, "__name__", type(named).__name__)
    return FunctionMetric("lambda" if name == "<lambda>" else name, function)
