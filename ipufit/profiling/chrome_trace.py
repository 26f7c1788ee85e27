# SPDX-License-Identifier: Apache-2.0
"""A timeline in the Chrome trace event format, which Perfetto opens too.

The format: "Trace Event Format", Google,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from typing import Any, Mapping

from .timeline import Span, Timeline

_MICRO = 1e6
_THREAD = 1


def chrome_trace(
    timeline: Timeline, process: int, label: str, facts: Mapping[str, Any]
) -> str:
    """Write a timeline as the JSON that `chrome://tracing` and Perfetto open.

    Each span is a complete event (`"ph": "X"`), with times in microseconds.

    Args:
        timeline: A timeline that has stopped.
        process: Number of the process in the trace.
        label: Name of the process in the trace.
        facts: Further facts about the run.

    Example:
        >>> timeline = Timeline(iter([0.0, 1.0]).__next__)
        >>> timeline.start("fit")
        >>> timeline.stop()
        >>> trace = json.loads(chrome_trace(timeline, 7, "process 0 of 1", {}))
        >>> [event["name"] for event in trace["traceEvents"]]
        ['process_name', 'thread_name', 'fit']
        >>> trace["traceEvents"][-1]["dur"]
        1000000.0
    """
    events = [
        _named("process_name", process, label),
        _named("thread_name", process, "host"),
        *(_event(span, process) for span in _outer_first(timeline)),
    ]
    other = {
        **facts,
        "seconds_by_phase": timeline.phases,
        "spans_left_out": timeline.num_left_out,
    }
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    return json.dumps(trace, default=str)


def _outer_first(timeline: Timeline) -> list[Span]:
    """The spans in the order of their starts, each before those within it."""
    return sorted(timeline.spans, key=lambda span: (span.start, span.depth))


def _named(what: str, process: int, name: str) -> dict[str, Any]:
    """An event that names the process or its thread."""
    ids = {"pid": process, "tid": _THREAD}
    return {"name": what, "ph": "M", **ids, "args": {"name": name}}


def _event(span: Span, process: int) -> dict[str, Any]:
    return {
        "name": span.name,
        "cat": span.phase,
        "ph": "X",
        "ts": round(span.start * _MICRO, 3),
        "dur": round(span.seconds * _MICRO, 3),
        "pid": process,
        "tid": _THREAD,
        "args": dict(span.details),
    }
