# SPDX-License-Identifier: Apache-2.0
"""Trace points for Graphcore's PopVision System Analyser: none are recorded here."""

from __future__ import annotations

import contextlib
from typing import ContextManager, TypeVar

__all__ = ["Channel"]

_ObjectT = TypeVar("_ObjectT")


class Channel:
    """A group of trace points. Without the Analyser's library nothing happens.

    Args:
        name: Of the group.

    Example:
        >>> channel = Channel("training")
        >>> with channel.tracepoint("epoch"):
        ...     total = sum(range(3))
        >>> total
        3
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def instrument(self, obj: _ObjectT, *methods: str) -> _ObjectT:
        """Record each call of some methods.

        Args:
            obj: The object.
            *methods: Their names.

        Returns:
            The same object.

        Example:
            >>> model = object()
            >>> Channel("training").instrument(model, "forward") is model
            True
        """
        return obj

    def tracepoint(self, name: str) -> ContextManager[None]:
        """Record the time that a `with` statement takes.

        Args:
            name: Of the trace point.

        Returns:
            A context manager.

        Example:
            >>> with Channel("training").tracepoint("step"):
            ...     pass
        """
        return contextlib.nullcontext()
