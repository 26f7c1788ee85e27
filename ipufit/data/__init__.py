# SPDX-License-Identifier: Apache-2.0
"""From users' data to the batches of calls."""

from __future__ import annotations

from .datasets import CachedDataset
from .loaders import FixedSizeBatches

__all__ = ["CachedDataset", "FixedSizeBatches"]
