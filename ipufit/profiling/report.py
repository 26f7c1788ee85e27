# SPDX-License-Identifier: Apache-2.0
"""The seconds of phases as rows and as text."""

from __future__ import annotations

from typing import Mapping, NamedTuple

from .phases import PHASES


class Row(NamedTuple):
    """The time of a phase.

    Attributes:
        phase: Its name.
        seconds: Seconds that it took.
        share: The same as a share of all phases, 0 to 1.
    """

    phase: str
    seconds: float
    share: float


def rows_of(phases: Mapping[str, float]) -> list[Row]:
    """The phases that took time, in the order of `PHASES`.

    Args:
        phases: Seconds by phase.

    Example:
        >>> for row in rows_of({"device": 3.0, "host data": 1.0}):
        ...     print(*row)
        host data 1.0 0.25
        device 3.0 0.75
    """
    whole = sum(phases.values()) or 1.0
    order = {name: number for number, name in enumerate(PHASES)}
    names = sorted(phases, key=lambda name: order.get(name, len(order)))
    return [Row(name, phases[name], phases[name] / whole) for name in names]


def text_of(name: str, phases: Mapping[str, float]) -> str:
    """A table of the phases, for a terminal.

    Args:
        name: Name of the run.
        phases: Seconds by phase.

    Example:
        >>> print(text_of("fit", {"device": 3.0, "host data": 1.0}))
        fit: 4.000 s
          host data     1.000 s  25.0%  waiting for the batch of the next call
          device        3.000 s  75.0%  on the device; on IPUs with upload and download
    """
    lines = [f"{name}: {in_words(sum(phases.values()))}"]
    for phase, seconds, share in rows_of(phases):
        about = PHASES[phase].about if phase in PHASES else ""
        lines.append(f"  {phase:<11} {in_words(seconds):>9} {share:>6.1%}  {about}")
    return "\n".join(lines)


def in_words(seconds: float) -> str:
    """A time with three or more digits, and its unit.

    Example:
        >>> in_words(2.5), in_words(0.0125), in_words(3e-6)
        ('2.500 s', '12.500 ms', '3.000 us')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3f} {unit}"
    return f"{seconds / 1e-6:.3f} us"
