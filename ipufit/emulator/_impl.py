# SPDX-License-Identifier: Apache-2.0
"""What code that reaches into PopTorch's private module of this name asks for."""

from __future__ import annotations

from ._trace_state import is_tracing


def isDispatchTracing() -> bool:
    """Whether a module is being traced: PopTorch has one way to trace left.

    Example:
        >>> isDispatchTracing()
        False
    """
    return is_tracing()
