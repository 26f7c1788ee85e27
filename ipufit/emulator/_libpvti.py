# SPDX-License-Identifier: Apache-2.0
"""`libpvti`, with which scripts mark what PopVision shows; here it records nothing.

Its names are those that public PopTorch scripts use.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Callable, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


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


def instrument_fn(channel: str) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that marks calls: it returns the function itself."""
    return lambda function: function
