# SPDX-License-Identifier: Apache-2.0
"""Trace points for Graphcore's PopVision System Analyser; nothing is recorded.

`libpvti`, with which scripts mark what the Analyser shows, is another name of this
module. It has the names that public PopTorch scripts use.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Callable, TypeVar

__all__ = ["Channel"]

ObjectT = TypeVar("ObjectT")


class Channel:
    """Group of trace points; it does nothing without the Analyser's library.

    Example:
        >>> channel = Channel("training")
        >>> with channel.tracepoint("epoch"):
        ...     total = sum(range(3))
        >>> total
        3
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def instrument(self, obj: ObjectT, *methods: str) -> ObjectT:
        """Record calls of some methods of an object, and return the object.

        Example:
            >>> model = object()
            >>> Channel("training").instrument(model, "forward") is model
            True
        """
        return obj

    def tracepoint(self, name: str) -> Tracepoint:
        """Record the time that a `with` statement takes, under a name.

        Example:
            >>> with Channel("training").tracepoint("step"):
            ...     pass
        """
        return Tracepoint(self.name, name)


def createTraceChannel(name: str) -> str:
    """Return a channel, which is its name here.

    Example:
        >>> channel = createTraceChannel("training")
        >>> with Tracepoint(channel, "epoch"):
        ...     pass
    """
    return name


def checkTraceChannel(channel: str) -> bool:
    """Return whether a channel is recorded: never."""
    return False


class Tracepoint(AbstractContextManager):  # type: ignore[type-arg]
    """A mark around a part of a script."""

    def __init__(self, channel: str, label: str) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        """Do nothing."""

    @staticmethod
    def begin(channel: str, label: str) -> None:
        """Begin a part: nothing is recorded."""

    @staticmethod
    def end(channel: str, label: str) -> None:
        """End a part: nothing is recorded."""

    @staticmethod
    def event(channel: str, label: str) -> None:
        """Mark a moment: nothing is recorded."""


class Series:
    """Values of a graph or a heat map."""

    def add(self, value: Any) -> None:
        """Add a value: nothing is recorded."""


class Graph:
    """A graph of values over time."""

    def __init__(self, name: str, unit: str = "") -> None:
        pass

    def addSeries(self, name: str) -> Series:
        """Add a line to the graph."""
        return Series()


class HeatmapDouble(Series):
    """A heat map of the distribution of values over time."""

    def __init__(self, name: str, edges: Any, unit: str = "") -> None:
        pass


def instrument(instance: Any, methods: Any, channel: str) -> None:
    """Mark calls of methods: they stay as they are."""


def instrument_fn(channel: str) -> Callable[[ObjectT], ObjectT]:
    """Return a decorator that marks calls: it returns the function itself."""
    return lambda function: function
