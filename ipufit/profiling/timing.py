# SPDX-License-Identifier: Apache-2.0
"""Functions, methods and iterables whose time goes into a timeline."""

from __future__ import annotations

import contextlib
from functools import wraps
from typing import Any, Callable, Iterator, Mapping, Tuple, TypeVar

from .timeline import Timeline

_Result = TypeVar("_Result")

NameAndPhase = Tuple[str, str]
"""The name and the phase of a span."""


def timed(
    timeline: Timeline, function: Callable[..., _Result], name: str, phase: str
) -> Callable[..., _Result]:
    """Make a function that records each call of another, one that fails too.

    Args:
        timeline: Timeline of the profile, which the spans are added to.
        function: The function to call.
        name: Name of the spans.
        phase: Phase of the spans.

    Example:
        >>> timeline = Timeline(iter([0.0, 1.0, 3.0, 3.0]).__next__)
        >>> timeline.start("run")
        >>> timed(timeline, len, "length", "figures")([5, 6])
        2
        >>> timeline.stop()
        >>> timeline.phases
        {'figures': 2.0, 'loop': 1.0}
    """
    begin, end = timeline.begin, timeline.end

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> _Result:
        if not timeline.is_on:
            return function(*args, **kwargs)
        span = begin(name, phase)
        try:
            return function(*args, **kwargs)
        finally:
            end(span)

    return call


@contextlib.contextmanager
def timed_methods(
    timeline: Timeline, owner: Any, methods: Mapping[str, NameAndPhase]
) -> Iterator[None]:
    """Record the calls of some methods of one object, while the context is open.

    The object gets attributes that hide its methods, and loses them in the end. Other
    objects of its class are as before, so nothing is paid where nothing is recorded.

    Args:
        timeline: Timeline of the profile, which the spans are added to.
        owner: The object; it must have a `__dict__`.
        methods: Name and phase of the spans, by the name of the method.
    """
    own = vars(owner)  # a frozen dataclass lets nobody set attributes
    before = {name: own[name] for name in methods if name in own}
    for method, (name, phase) in methods.items():
        own[method] = timed(timeline, getattr(owner, method), name, phase)
    try:
        yield
    finally:
        for method in methods:
            del own[method]
        own.update(before)


class TimedItems:
    """An iterable whose items are waited for in spans; all else is the iterable's own.

    Args:
        timeline: Timeline of the profile, which the spans are added to.
        items: The iterable.
        name: Name of the spans.
        phase: Phase of the spans.

    Example:
        >>> timeline = Timeline(iter(range(9)).__next__)
        >>> items = TimedItems(timeline, [5, 6], "batch", "host data")
        >>> timeline.start("run")
        >>> list(items)
        [5, 6]
        >>> timeline.stop()
        >>> [span.name for span in timeline.spans]
        ['batch', 'batch', 'batch', 'run']
    """

    def __init__(self, timeline: Timeline, items: Any, name: str, phase: str) -> None:
        own = vars(self)
        own["_timeline"] = timeline
        own["_items"] = items
        own["_of_spans"] = name, phase

    def __getattr__(self, name: str) -> Any:
        """Get an attribute of the iterable."""
        return getattr(vars(self)["_items"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the iterable."""
        setattr(self._items, name, value)

    def __iter__(self) -> Iterator[Any]:
        """Give the items; the last span is the wait for the end."""
        timeline, (name, phase) = self._timeline, self._of_spans
        begin, end = timeline.begin, timeline.end
        span = begin(name, phase)
        try:
            items = iter(self._items)
            for item in items:
                end(span)
                yield item
                span = begin(name, phase)
        finally:
            end(span)
