# SPDX-License-Identifier: Apache-2.0
"""Two executors and the loops that run them."""

from __future__ import annotations

from .coverage import describe_coverage
from .evaluation import Evaluation
from .executors import Executors
from .loop import predict, train

__all__ = ["Evaluation", "Executors", "describe_coverage", "predict", "train"]
