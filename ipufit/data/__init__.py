# SPDX-License-Identifier: Apache-2.0
"""From the user's data to the batches of calls."""

from __future__ import annotations

from .adapters import Source, as_source, fit_sources, split_validation
from .loader import InferenceBatches, TrainingBatches

__all__ = [
    "InferenceBatches",
    "Source",
    "TrainingBatches",
    "as_source",
    "fit_sources",
    "split_validation",
]
