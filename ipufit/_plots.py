# SPDX-License-Identifier: Apache-2.0
"""Axes of matplotlib, and heat maps in them."""

from __future__ import annotations

import math
from typing import Any, Sequence

from ._lazy import need

Axes = Any
"""`matplotlib.axes.Axes`, which needn't be installed."""

Figure = Any
"""`matplotlib.figure.Figure`."""

_MOST_LABELS = 40
_SMALLEST_TEXT = 5.0  # points


def axes_for(
    count: int,
    axes: Axes | Sequence[Axes] | None,
    who: str,
    size: tuple[float, float] = (4.5, 3.4),
) -> list[Axes]:
    """Return the user's axes, or create them in a new figure of pyplot.

    Args:
        count: Number of axes to create.
        axes: Axes of the user, of any number; None to create axes.
        who: Name of the method that draws, for the message.
        size: Width and height of each created axes, in inches.

    Raises:
        ConfigError: matplotlib isn't installed.
    """
    if axes is not None:
        flat: Any = getattr(axes, "flat", axes)  # `subplots` gives an array
        return [axes] if hasattr(axes, "plot") else list(flat)
    pyplot = need("matplotlib.pyplot", who, "ipufit[plot]")
    columns = min(count, 3)
    rows = math.ceil(count / columns)
    figure, grid = pyplot.subplots(
        rows,
        columns,
        figsize=(columns * size[0], rows * size[1]),
        layout="constrained",
        squeeze=False,
    )
    created = list(grid.flat)
    for unused in created[count:]:
        unused.remove()
    if "inline" in pyplot.get_backend():  # else a notebook would show the figure twice
        pyplot.close(figure)
    return created[:count]


def label_rows(axis: Any, names: Sequence[Any]) -> None:
    """Label the ticks 0, 1, ... of an axis; of many names only some are shown."""
    every = math.ceil(len(names) / _MOST_LABELS)
    axis.set_ticks(range(0, len(names), every), names[::every])


def draw_confusion(
    axes: Axes, matrix: Any, labels: Sequence[Any] | None = None
) -> None:
    """Draw a confusion matrix, with a number in each cell where there is room.

    Args:
        axes: Where to draw.
        matrix: Rows of numbers: a row for each true class, a column for each predicted
            class.
        labels: Names of the classes; None for their indices.
    """
    image = axes.imshow(matrix, cmap="Blues", vmin=0)
    for axis in (axes.xaxis, axes.yaxis):
        label_rows(axis, range(len(matrix)) if labels is None else labels)
    if labels is not None:
        axes.tick_params("x", rotation=45)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.figure.colorbar(image, ax=axes)
    texts = [
        [f"{v:.0f}" if float(v).is_integer() else f"{v:.2f}" for v in row]
        for row in matrix
    ]
    extent = axes.get_window_extent()
    cell = 72 * min(extent.width, extent.height) / axes.figure.dpi / len(matrix)
    longest = max(len(text) for row in texts for text in row)
    size = min(10.0, cell * min(0.8, 1.4 / longest))  # points
    if size < _SMALLEST_TEXT:
        return
    middle = image.norm.vmax / 2
    for y, row in enumerate(matrix):
        for x, value in enumerate(row):
            color = "white" if value > middle else "black"
            at_center = {"ha": "center", "va": "center"}
            axes.text(x, y, texts[y][x], color=color, size=size, **at_center)
