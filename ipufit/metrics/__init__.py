# SPDX-License-Identifier: Apache-2.0
"""Metrics: figures over samples, as exact sums where they are such."""

from __future__ import annotations

from .base import (
    FunctionMetric,
    Metric,
    StreamedMetric,
    mean_sums,
    rows_of,
    spread_weights,
)
from .names import MetricLike, resolve_metrics

__all__ = [
    "FunctionMetric",
    "Metric",
    "MetricLike",
    "StreamedMetric",
    "mean_sums",
    "resolve_metrics",
    "rows_of",
    "spread_weights",
]
