# SPDX-License-Identifier: Apache-2.0
"""`IPUModel`: Keras's `compile`, `fit`, `evaluate` and `predict` for a torch module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipufit._lazy import imported_at_first_use

from .model import IPUModel

if TYPE_CHECKING:
    from .benchmarking import BenchmarkResult
    from .checking import CheckReport, Finding
    from .comparing import Comparison, Difference, compare

__all__ = [
    "BenchmarkResult",
    "CheckReport",
    "Comparison",
    "Difference",
    "Finding",
    "IPUModel",
    "compare",
]

_HOMES = {
    "benchmarking": ["BenchmarkResult"],
    "checking": ["CheckReport", "Finding"],
    "comparing": ["Comparison", "Difference", "compare"],
}

__getattr__, __dir__ = imported_at_first_use(__name__, _HOMES)
