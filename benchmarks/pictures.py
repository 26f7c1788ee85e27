# SPDX-License-Identifier: Apache-2.0
"""The picture of speeds, as wide as a page of text, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Sequence

from .contestants import CONTESTANTS
from .results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 720
"""Pixels of the picture across, as of a page of text."""
_DPI = 96
_STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,  # points: 12 pixels
    "axes.titlesize": 9.75,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "svg.fonttype": "none",  # letters stay letters: small, and they can be searched
    "svg.hashsalt": "ipufit",  # the same names inside of the file each time
}
_OURS, _OTHERS, _TUNED = "#1b6ca8", "#a9b4bf", "#d6c9a8"
_PANELS = {
    "W2": "Small MLP",
    "W1": "MNIST CNN",
    "W3": "10 micro-batches",
    "lstm": "LSTM",
    "transformer": "Transformer",
    "resnet18": "ResNet-18",
}


def draw_speeds(rows: Sequence[Row], path: Path) -> None:
    """Draw bars of the CPU speed in training, a panel for each workload.

    The same results give the same bytes.
    """
    import matplotlib
    from matplotlib.figure import Figure

    trained = [row for row in rows if row.operation == "train"]
    names = [name for name in _PANELS if any(row.workload == name for row in trained)]
    shown = list(dict.fromkeys(row.contestant for row in trained))[1:]  # not the loop
    edge = 1.8 * max(2.0, *(row.speed.high for row in trained))
    lines = -(-len(names) // 3)
    with matplotlib.rc_context(_STYLE):
        height = lines * (70 + 22 * len(shown)) + 40
        figure = Figure(figsize=(WIDTH / _DPI, height / _DPI), dpi=_DPI)
        figure.set_layout_engine("constrained")
        figure.suptitle(
            "Training speed by CPU time; the plain loop is 1", fontsize=10.5
        )
        panels = figure.subplots(lines, 3, sharex=True, sharey=True, squeeze=False)
        for axes in panels.flat[len(names) :]:
            axes.set_visible(False)
        for axes, name in zip(panels.flat, names):
            for row in trained:
                if row.workload == name and row.contestant in shown:
                    _bar(axes, shown.index(row.contestant), row)
            axes.axvline(1.0, color="#333333", linewidth=1)
            axes.set_title(_PANELS[name], loc="left")
            axes.set_xscale("log", base=2)
            axes.set_xlim(0.18, edge)
            ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8) if tick < edge]
            axes.set_xticks(
                ticks, [f"{t:g}" if t >= 1 else f"1/{1 / t:g}" for t in ticks]
            )
            axes.grid(visible=False, axis="y")
            axes.set_yticks(
                range(len(shown)), [CONTESTANTS[one].title for one in shown]
            )
            axes.set_ylim(len(shown) - 0.4, -0.6)
            axes.tick_params(axis="y", length=0)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    written = path.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line.rstrip() for line in written)
    path.write_text(f"{text}\n", encoding="utf-8")


def _bar(axes: Axes, place: int, row: Row) -> None:
    package = CONTESTANTS[row.contestant].package
    own = _OURS if package == "ipufit" else _OTHERS if package else _TUNED
    median, least, greatest = row.speed
    axes.barh(place, median - 1.0, left=1.0, height=0.62, color=own)
    axes.plot([least, greatest], [place, place], color="#555555", linewidth=1)
    weight = "bold" if package == "ipufit" else "normal"
    at = max(greatest, 1.0) * 1.08
    axes.text(at, place, f"{median:.2f}", va="center", fontsize=8.25, fontweight=weight)
