# SPDX-License-Identifier: Apache-2.0
"""Rules of operators that a device computes otherwise than torch."""

# The modules of rules add their rules as they are imported.
from __future__ import annotations

from ..operators import grave_messages as grave_messages
from . import (  # noqa: F401
    activations,
    dtypes,
    elementwise,
    indexing,
    layers,
    operands,
    reductions,
    resizing,
)
