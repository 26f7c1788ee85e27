# SPDX-License-Identifier: Apache-2.0
"""Rules of operators that a device computes otherwise than torch."""

# The modules of rules add their rules as they are imported.
from __future__ import annotations

from ..operators import (
    apply_rules,
    findings,
    grave_messages,
    settle_shapes,
)
from . import (
    activations,
    dtypes,
    elementwise,
    indexing,
    layers,
    operands,
    reductions,
    resizing,
)

__all__ = [
    "activations",
    "apply_rules",
    "dtypes",
    "elementwise",
    "findings",
    "grave_messages",
    "indexing",
    "layers",
    "operands",
    "reductions",
    "resizing",
    "settle_shapes",
]
