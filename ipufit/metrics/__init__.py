# SPDX-License-Identifier: Apache-2.0
"""Metrics: figures over samples, as exact sums where they are such."""

from __future__ import annotations

from .base import (
    FunctionMetric,
    Metric,
    StreamedMetric,
    detached,
    flat,
    in_float32,
    mean_sums,
    rows_of,
    spread_weights,
)
from .classification import (
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    SparseCategoricalAccuracy,
    SparseTopKCategoricalAccuracy,
    TopKAccuracy,
    TopKCategoricalAccuracy,
)
from .confusion import (
    BalancedAccuracy,
    F1Score,
    FalseNegatives,
    FalsePositives,
    FBetaScore,
    IoU,
    MeanIoU,
    Precision,
    Recall,
    Specificity,
    TrueNegatives,
    TruePositives,
)
from .correlation import (
    ExplainedVariance,
    PearsonCorrelation,
    R2Score,
    SpearmanCorrelation,
)
from .hinge import CategoricalHinge
from .names import (
    AnyMetric,
    MetricLike,
    metric_names,
    resolve_metric,
    resolve_metrics,
)
from .probabilistic import (
    BinaryCrossentropy,
    CategoricalCrossentropy,
    CrossEntropy,
    KLDivergence,
    NegativeLogLikelihood,
    Perplexity,
    Poisson,
    SparseCategoricalCrossentropy,
)
from .ranking import AUC, AveragePrecision, ExactAUC
from .regression import CosineSimilarity, RootMeanSquaredError
from .streamed import StreamedFunction
from .torchmetrics_adapter import TorchMetric

__all__ = [
    "AUC",
    "Accuracy",
    "AnyMetric",
    "AveragePrecision",
    "BalancedAccuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "CategoricalHinge",
    "CosineSimilarity",
    "CrossEntropy",
    "ExactAUC",
    "ExplainedVariance",
    "F1Score",
    "FBetaScore",
    "FalseNegatives",
    "FalsePositives",
    "FunctionMetric",
    "IoU",
    "KLDivergence",
    "MeanIoU",
    "Metric",
    "MetricLike",
    "NegativeLogLikelihood",
    "PearsonCorrelation",
    "Perplexity",
    "Poisson",
    "Precision",
    "R2Score",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
    "SpearmanCorrelation",
    "Specificity",
    "StreamedFunction",
    "StreamedMetric",
    "TopKAccuracy",
    "TopKCategoricalAccuracy",
    "TorchMetric",
    "TrueNegatives",
    "TruePositives",
    "detached",
    "flat",
    "in_float32",
    "mean_sums",
    "metric_names",
    "resolve_metric",
    "resolve_metrics",
    "rows_of",
    "spread_weights",
]
