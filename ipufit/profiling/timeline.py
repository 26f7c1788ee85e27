# SPDX-License-Identifier: Apache-2.0
"""A timeline: nested spans of time, and the seconds of each phase."""

from __future__ import annotations

import time
from threading import get_ident
from typing import Any, Callable, Mapping, NamedTuple

REST = "loop"
"""The phase of time that no inner span takes."""

MOST_SPANS = 50_000
"""Spans that a timeline keeps; the seconds of phases go on being added up."""


_NOTHING: Mapping[str, Any] = {}


class Span(NamedTuple):
    """A time that one piece of work took.

    Attributes:
        name: Name of the work.
        phase: Name of its phase.
        start: Seconds from the start of the timeline.
        seconds: Its length.
        depth: Number of spans around it.
        details: Further facts.
    """

    name: str
    phase: str
    start: float
    seconds: float
    depth: int
    details: Mapping[str, Any]


class OpenSpan:
    """A span that hasn't ended yet."""

    __slots__ = ("details", "inner", "name", "phase", "start")

    def __init__(
        self, name: str, phase: str, start: float, details: dict[str, Any] | None
    ) -> None:
        self.name = name
        self.phase = phase
        self.start = start
        self.inner = 0.0
        self.details = details


class Timeline:
    """Records spans between `start` and `stop`, each within the one around it.

    The seconds of a phase are those of its spans without the spans inside them. So the
    phases of a timeline add up to its length. Only the thread that starts it is
    recorded.

    Args:
        clock: Returns the time in seconds, from any origin.
        most_spans: Number of spans to keep. Later ones count in `phases`, and aren't
            in `spans`.

    Attributes:
        spans: Spans that have ended, in the order of their ends.
        phases: Seconds by phase.
        num_left_out: Number of spans that aren't in `spans`.
        is_on: Whether it records.

    Example:
        >>> timeline = Timeline(iter([0.0, 1.0, 5.0, 7.0]).__next__)
        >>> timeline.start("fit")
        >>> span = timeline.begin("batch", "host data")
        >>> timeline.end(span)
        >>> timeline.stop()
        >>> timeline.phases
        {'host data': 4.0, 'loop': 3.0}
        >>> timeline.seconds
        7.0
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        most_spans: int = MOST_SPANS,
    ) -> None:
        self._clock = clock
        self._most_spans = most_spans
        self._open: list[OpenSpan] = []
        self._origin: float | None = None
        self._thread = 0
        self.is_on = False
        self.spans: list[Span] = []
        self.phases: dict[str, float] = {}
        self.num_left_out = 0

    @property
    def seconds(self) -> float:
        """Seconds of all phases together."""
        return sum(self.phases.values())

    def forget(self) -> None:
        """Begin anew, without spans; what records into this object goes on with it."""
        self._open, self._origin, self.is_on = [], None, False
        self.spans, self.phases, self.num_left_out = [], {}, 0

    def start(self, name: str, **details: Any) -> None:
        """Begin to record, with a span around all others.

        Args:
            name: Name of that span.
            **details: Further facts of it.
        """
        now = self._clock()
        if self._origin is None:
            self._origin = now
        self._thread = get_ident()
        self._open = [OpenSpan(name, REST, now, details)]
        self.is_on = True

    def end_inner(self) -> None:
        """End all spans that are open, but the one around all others."""
        if len(self._open) > 1:
            self.end(self._open[1])

    def stop(self, **details: Any) -> None:
        """End all spans that are open, and record nothing more.

        Args:
            **details: Further facts of the span around all others.
        """
        if not self.is_on:
            return
        self._open[0].details = {**(self._open[0].details or {}), **details}
        now = self._clock()
        while self._open:
            self._close(now)
        self.is_on = False

    def begin(
        self, name: str, phase: str, details: dict[str, Any] | None = None
    ) -> OpenSpan | None:
        """Begin a span within the innermost one that is open.

        Returns:
            The span, for `end`; None if nothing is recorded.
        """
        if not self.is_on or get_ident() != self._thread:
            return None
        span = OpenSpan(name, phase, self._clock(), details)
        self._open.append(span)
        return span

    def end(self, span: OpenSpan | None) -> None:
        """End a span, and those within it that are still open.

        Nothing is done for None, or for a span that has ended with the timeline.
        """
        stack = self._open
        if span is None or get_ident() != self._thread:
            return
        if stack and stack[-1] is span:
            self._close(self._clock())
        elif any(one is span for one in stack):
            now = self._clock()
            while stack[-1] is not span:
                self._close(now)
            self._close(now)

    def end_named(self, name: str) -> None:
        """End the innermost open span of a name, if there is one."""
        if not self.is_on or get_ident() != self._thread:
            return
        for span in reversed(self._open[1:]):
            if span.name == name:
                self.end(span)
                return

    def _close(self, now: float) -> None:
        """End the innermost span."""
        stack = self._open
        span = stack.pop()
        seconds = now - span.start
        phases = self.phases
        phases[span.phase] = phases.get(span.phase, 0.0) + seconds - span.inner
        if stack:
            stack[-1].inner += seconds
        if len(self.spans) < self._most_spans or not stack:
            start = span.start - (self._origin or 0.0)
            details = _NOTHING if span.details is None else span.details
            self.spans.append(
                Span(span.name, span.phase, start, seconds, len(stack), details)
            )
        else:
            self.num_left_out += 1
