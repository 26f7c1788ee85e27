# SPDX-License-Identifier: Apache-2.0
"""Files that a run leaves behind."""

from __future__ import annotations

from .weights import load_weights, save_weights

__all__ = ["load_weights", "save_weights"]
