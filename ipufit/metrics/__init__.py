# SPDX-License-Identifier: Apache-2.0
"""Metrics: figures over samples, as exact sums."""

from __future__ import annotations

from .base import FunctionMetric, Metric, Sums
from .collection import MetricCollection, resolve_metrics

__all__ = [
    "FunctionMetric",
    "Metric",
    "MetricCollection",
    "Sums",
    "resolve_metrics",
]
