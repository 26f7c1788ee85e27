# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F403 - each file lists its public names once, in its `__all__`
"""Metrics: values over all samples, computed from exact sums where possible."""

from __future__ import annotations

from . import (
    base,
    classification,
    confusion,
    correlation,
    names,
    probabilistic,
    ranking,
    regression,
    streamed,
    torchmetrics_adapter,
)
from .base import *
from .classification import *
from .confusion import *
from .correlation import *
from .names import *
from .probabilistic import *
from .ranking import *
from .regression import *
from .streamed import *
from .torchmetrics_adapter import *

_FILES = (
    *(base, classification, confusion, correlation, names, probabilistic, ranking),
    *(regression, streamed, torchmetrics_adapter),
)
__all__: list[str] = [name for file in _FILES for name in file.__all__]
