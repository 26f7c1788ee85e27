# SPDX-License-Identifier: Apache-2.0
"""A timeline in the Chrome trace event format, which Perfetto opens too.

The format: "Trace Event Format", Google,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from typing import Any, Mapping, Sequence

from .timeline import Span, Timeline

_MICRO = 1e6
_THREAD = 1


def chrome_trace(
    timeline: Timeline,
    process: int,
    label: str,
    facts: Mapping[str, Any],
    events: Sequence[str],
) -> str:
    """Write a timeline as the JSON that `chrome://tracing` and Perfetto open.

    Args:
        timeline: A timeline that has stopped.
        process: Number of the process in the trace.
        label: Name of the process in the trace.
        facts: Further facts about the run.
        events: Its spans, from `events_of`.

    Example:
        >>> timeline = Timeline(iter([0.0, 1.0]).__next__)
        >>> timeline.start("fit")
        >>> timeline.stop()
        >>> events = events_of(timeline.spans, 7)
        >>> trace = json.loads(chrome_trace(timeline, 7, "process 0", {}, events))
        >>> [event["name"] for event in trace["traceEvents"]]
        ['process_name', 'thread_name', 'fit']
        >>> trace["traceEvents"][-1]["dur"]
        1000000.0
    """
    names = [
        _named("process_name", process, label),
        _named("thread_name", process, "host"),
    ]
    other = {
        **facts,
        "seconds_by_phase": timeline.phases,
        "spans_left_out": timeline.num_left_out,
    }
    listed = ",\n".join([*names, *events])
    return (
        f'{{"traceEvents":[\n{listed}\n],"displayTimeUnit":"ms",'
        f'"otherData":{json.dumps(other, default=str)}}}\n'
    )


def events_of(spans: Sequence[Span], process: int) -> list[str]:
    """Each span as a complete event (`"ph": "X"`), with times in microseconds.

    Args:
        spans: Spans in any order.
        process: Number of the process in the trace.
    """
    known: dict[tuple[str, str], str] = {}
    events = []
    for name, phase, start, seconds, _, details in spans:
        begin = known.get((name, phase))
        if begin is None:
            ids = {"ph": "X", "pid": process, "tid": _THREAD}
            begin = json.dumps({"name": name, "cat": phase, **ids})[:-1]
            known[name, phase] = begin
        args = json.dumps(dict(details), default=str) if details else "{}"
        times = f'"ts":{start * _MICRO:.3f},"dur":{seconds * _MICRO:.3f}'
        events.append(f'{begin},{times},"args":{args}}}')
    return events


def _named(what: str, process: int, name: str) -> str:
    """An event that names the process or its thread."""
    ids = {"pid": process, "tid": _THREAD}
    return json.dumps({"name": what, "ph": "M", **ids, "args": {"name": name}})
