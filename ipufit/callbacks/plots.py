# SPDX-License-Identifier: Apache-2.0
"""Axes of matplotlib, and curves in them."""

from __future__ import annotations

import math
from typing import Any, Sequence

from ipufit._optional import need
from ipufit.errors import ConfigError

Axes = Any
"""`matplotlib.axes.Axes`, which needn't be installed."""

Figure = Any
"""`matplotlib.figure.Figure`."""

_COLUMNS = 3
_INCHES = 4.5, 3.4


def axes_for(
    who: str, count: int, given: Axes | Sequence[Axes] | None
) -> tuple[Figure, list[Axes]]:
    """Return the axes to draw in; new ones in a new figure if none are given.

    Args:
        who: Function that draws, for messages.
        count: Number of axes needed.
        given: Axes of the user, one or several; None for new ones.

    Returns:
        The figure, and `count` axes.

    Raises:
        ConfigError: matplotlib isn't installed, or `given` has another number of axes.
    """
    pyplot = need("matplotlib.pyplot", who, "ipufit[plot]")
    if given is not None:
        every = _listed(given)
        if len(every) != count:
            raise ConfigError(
                f"{who} draws {count} figures, and got {len(every)} axes. Pass one for "
                "each, or choose with names=[...]."
            )
        return every[0].figure, every
    columns = min(count, _COLUMNS)
    rows = math.ceil(count / columns)
    figure, grid = pyplot.subplots(
        rows,
        columns,
        figsize=(columns * _INCHES[0], rows * _INCHES[1]),
        layout="constrained",
        squeeze=False,
    )
    every = list(grid.flat)
    for unused in every[count:]:
        unused.remove()
    if "inline" in pyplot.get_backend():  # a notebook shows what a cell returns, too
        pyplot.close(figure)
    return figure, every[:count]


def draw_curve(
    axes: Axes, x: Sequence[float], y: Sequence[float], label: str | None = None
) -> None:
    """Draw a curve, with markers if it has few points."""
    axes.plot(x, y, label=label, marker="." if len(x) < 50 else None)


def _listed(given: Axes | Sequence[Axes]) -> list[Axes]:
    if hasattr(given, "plot"):
        return [given]
    flat = given.flat if hasattr(given, "flat") else given  # `subplots` gives an array
    return list(flat)
