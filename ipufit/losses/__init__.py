# SPDX-License-Identifier: Apache-2.0
"""Losses: by name, torch's modules, and users' functions."""

from __future__ import annotations

from .loss import Loss, LossTerms
from .named import LossLike, resolve_loss
from .smoothing import check_smoothing, smoothed

__all__ = [
    "Loss",
    "LossLike",
    "LossTerms",
    "check_smoothing",
    "resolve_loss",
    "smoothed",
]
