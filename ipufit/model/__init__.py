# SPDX-License-Identifier: Apache-2.0
"""`IPUModel`: Keras's `compile`, `fit`, `evaluate` and `predict` for a torch module."""

from __future__ import annotations

from .benchmark_result import BenchmarkResult
from .checking import CheckReport, Finding
from .comparing import compare
from .comparison import Comparison, Difference
from .model import IPUModel

__all__ = [
    "BenchmarkResult",
    "CheckReport",
    "Comparison",
    "Difference",
    "Finding",
    "IPUModel",
    "compare",
]
