# SPDX-License-Identifier: Apache-2.0
"""One HTML page that shows a timeline; it loads nothing from anywhere."""

from __future__ import annotations

import html
import json
from typing import Any, Mapping, Sequence

from .drawing import SCRIPT, STYLE
from .phases import PHASES
from .report import in_words, rows_of
from .timeline import Span, Timeline

_MICRO = 1e6
_PLAIN = "#888888"


class Rows:
    """Spans as a page's script has them.

    Each is a row: indices of name and phase, start and length in microseconds, depth,
    details or null.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._phases: dict[str, int] = {}
        self._rows: list[str] = []

    def add(self, spans: Sequence[Span]) -> None:
        """Add spans, in any order."""
        names, phases, rows = self._names, self._phases, self._rows
        for name, phase, start, seconds, depth, details in spans:
            words = json.dumps(dict(details), default=str) if details else "null"
            indices = (
                names.setdefault(name, len(names)),
                phases.setdefault(phase, len(phases)),
            )
            times = f"{start * _MICRO:.1f},{seconds * _MICRO:.1f}"
            rows.append(f"[{indices[0]},{indices[1]},{times},{depth},{words}]")

    def data(self) -> str:
        """All rows as JSON, with which a script can begin."""
        head = {
            "names": list(self._names),
            "phases": list(self._phases),
            "colors": [_color(phase) for phase in self._phases],
        }
        text = f'{json.dumps(head)[:-1]},"spans":[{",".join(self._rows)}]}}'
        # A name with "</script>" in it must not end the script.
        return text.replace("<", "\\u003c")


def page(
    name: str,
    label: str,
    timeline: Timeline,
    facts: Mapping[str, Any],
    rows: Rows,
) -> str:
    """Make a page with the seconds of the phases, the timeline, and a table of names.

    The table of phases needs no script. The timeline can be zoomed and moved.

    Args:
        name: Name of the run.
        label: Name of the process.
        timeline: A timeline that has stopped.
        facts: Further facts about the run.
        rows: All its spans.

    Example:
        >>> timeline = Timeline(iter([0.0, 1.0]).__next__)
        >>> timeline.start("fit")
        >>> timeline.stop()
        >>> rows = Rows()
        >>> rows.add(timeline.spans)
        >>> text = page("fit-001", "process 0 of 1", timeline, {}, rows)
        >>> text[:15], "http" in text
        ('<!DOCTYPE html>', False)
    """
    title = html.escape(name)
    told = "".join(
        f"<li>{html.escape(str(key))}: {html.escape(str(value))}</li>"
        for key, value in facts.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p>{html.escape(label)}: {in_words(timeline.seconds)}</p>
<ul class="facts">{told}</ul>
<h2>Phases</h2>
<p>The seconds of a phase are without those of the phases inside it, so they add up to
the time of the run.</p>
{_phases(timeline)}
<h2>Timeline</h2>
<p>Turn the wheel to zoom, drag to move, double-click to see all. {_left_out(timeline)}
</p>
<canvas id="timeline"></canvas>
<p id="told">Point at a span to read about it.</p>
<h2>Spans by name</h2>
<table id="names"></table>
<script>const DATA = {rows.data()};
{SCRIPT}</script>
</body>
</html>
"""


def _phases(timeline: Timeline) -> str:
    """A table with a bar for each phase."""
    lines = [
        "<tr>"
        f"<td><i style='background:{_color(row.phase)}'></i>{html.escape(row.phase)}"
        f"</td><td>{in_words(row.seconds)}</td><td>{row.share:.1%}</td>"
        f"<td class='bar'><b style='width:{100 * row.share:.2f}%;"
        f"background:{_color(row.phase)}'></b></td>"
        f"<td>{html.escape(_about(row.phase))}</td></tr>"
        for row in rows_of(timeline.phases)
    ]
    return f"<table id='phases'>{''.join(lines)}</table>"


def _color(phase: str) -> str:
    return PHASES[phase].color if phase in PHASES else _PLAIN


def _about(phase: str) -> str:
    return PHASES[phase].about if phase in PHASES else ""


def _left_out(timeline: Timeline) -> str:
    """Say how many spans aren't drawn."""
    missing = timeline.num_left_out
    return f"Not drawn, but counted above: {missing} spans." if missing else ""
