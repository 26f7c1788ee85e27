# SPDX-License-Identifier: Apache-2.0
"""Figures and durations as text."""

from __future__ import annotations

from typing import Any


def in_lines(figures: str, width: int) -> str:
    """Break a line of metrics at `width`, between metrics where possible.

    Example:
        >>> print(in_lines("2/2 - accuracy: 0.9877 - loss: 0.2500", 24))
        2/2 - accuracy: 0.9877
        loss: 0.2500
    """
    first, *others = figures.split(" - ")
    lines = [first]
    for figure in others:
        longer = f"{lines[-1]} - {figure}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(figure)
    return "\n".join(lines)


def format_duration(seconds: float) -> str:
    """Format a duration as Keras does: in whole s, ms or us.

    Example:
        >>> format_duration(2.4), format_duration(0.0024), format_duration(2.4e-6)
        ('2s', '2ms', '2us')
    """
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.0f}s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.0f}ms"
    return f"{seconds * 1e6:.0f}us"


def format_logs(logs: dict[str, Any]) -> str:
    """Format metrics as Keras does: four decimals, or an exponent if they are small.

    Example:
        >>> format_logs({"accuracy": 0.98765, "loss": -0.00012})
        'accuracy: 0.9877 - loss: -1.2000e-04'
    """
    return " - ".join(
        f"{name}: {value:.4f}" if abs(value) > 1e-3 else f"{name}: {value:.4e}"
        for name, value in logs.items()
    )
