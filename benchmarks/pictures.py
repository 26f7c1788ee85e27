# SPDX-License-Identifier: Apache-2.0
"""Pictures of results, as wide as a page of text, by matplotlib.

`python -m benchmarks.page` draws all of them again. The same results give the same
bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from .contestants import CONTESTANTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

WIDTH = 720
"""Pixels of a picture across, as of a page of text."""
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
    "xtick.color": "#444444",
    "ytick.color": "#222222",
    "svg.fonttype": "none",  # letters stay letters: small, and they can be searched
    "svg.hashsalt": "ipufit",  # the same names inside of the file each time
}
_OURS, _SECOND, _OTHERS, _LIMITS = "#1b6ca8", "#e08a1e", "#a9b4bf", "#d6c9a8"

# Bars from the top to the bottom. Others than these are in the appendix.
_BARS = (
    *("ipufit-default", "ipufit"),
    *("keras-compiled", "keras", "lightning", "lightning-bare"),
    *("poutyne", "skorch", "pytorch-accelerated"),
    *("bare", "folded", "compiled"),
)
_LABELS = {
    "keras-compiled": "Keras, compiled",
    "lightning-bare": "Lightning, all off",
    "bare": "by hand: slices",
    "folded": "by hand: tuned",
    "compiled": "by hand: compiled",
}
_PANELS = {
    "W2": "Small MLP",
    "W1": "MNIST CNN",
    "W3": "MNIST CNN,\n10 micro-batches",
    "lstm": "LSTM",
    "transformer": "Transformer",
    "resnet18": "ResNet-18",
    "mlp": "Small MLP",
    "cnn": "MNIST CNN",
    "wide": "MLP, 2.9 million\nparameters",
}
_AXES = {
    "samples": "samples of the dataset",
    "device_iterations": "device iterations: updates of a call",
    "accumulation": "gradient accumulation",
    "replicas": "replicas",
}
_CREWS = {"ipufit": "ipufit", "loop": "DDP, tuned loop", "usual": "DDP, usual loop"}


def refuse_without_matplotlib(parser: argparse.ArgumentParser) -> None:
    """Exit with a message if pictures can't be drawn: before hours are measured."""
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("--write draws pictures: python -m pip install matplotlib")


def speeds(rows: Sequence[Row]) -> Figure:
    """Bars of the CPU speed in training, a panel for each network.

    Args:
        rows: Of `peers` or `networks`: `workload`, `operation`, `contestant`, and
            `cpu_speed` as median, least and greatest.
    """
    trained = [row for row in rows if row["operation"] == "train"]
    there = list(dict.fromkeys(row["workload"] for row in trained))
    names = [name for name in _PANELS if name in there] or there
    shown = [one for one in _BARS if any(row["contestant"] == one for row in trained)]
    figure, panels = _panels(len(names), height=98 + 22 * len(shown), left=146)
    edge = max([2.0, *(max(row["cpu_speed"]) for row in trained)])
    for axes, name in zip(panels, names):
        cells = {
            row["contestant"]: row["cpu_speed"]
            for row in trained
            if row["workload"] == name
        }
        for place, contestant in enumerate(shown):
            if contestant in cells:
                _bar(axes, place, contestant, cells[contestant])
        axes.axvline(1.0, color="#333333", linewidth=1)
        axes.set_title(_PANELS.get(name, name), loc="left")
        axes.set_xscale("log", base=2)
        axes.set_xlim(0.18, 2.4 * edge)
        ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16) if tick < 2.4 * edge]
        axes.set_xticks(ticks, [_factor(tick) for tick in ticks])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_yticks(range(len(shown)), [])
    panels[0].set_yticks(range(len(shown)), [_label(one) for one in shown])
    _caption(figure, "Training speed by CPU time; the plain loop is 1")
    return figure


def _bar(axes: Axes, place: int, contestant: str, speed: Sequence[float]) -> None:
    median, least, greatest = speed
    package = CONTESTANTS[contestant].package
    own = _OURS if package == "ipufit" else _OTHERS if package else _LIMITS
    axes.barh(place, median - 1.0, left=1.0, height=0.62, color=own)
    axes.plot([least, greatest], [place, place], color="#555555", linewidth=1)
    at = max(greatest, 1.0) * 1.08
    weight = "bold" if package == "ipufit" else "normal"
    axes.text(at, place, f"{median:.2f}", va="center", fontsize=8.25, fontweight=weight)


def sizes(rows: Sequence[Row]) -> Figure:
    """Lines of the CPU time of a sample, a panel for each thing that changes.

    Args:
        rows: Of `scaling`: `axis`, `value`, and `cpu_us_per_sample` as median, least
            and greatest.
    """
    names = [axis for axis in _AXES if any(row["axis"] == axis for row in rows)]
    names = names or list(dict.fromkeys(row["axis"] for row in rows))
    count = -(-len(names) // 2)
    figure, panels = _panels(2, rows=count, height=44 + 176 * count, left=52, gap=46)
    top = max(max(row["cpu_us_per_sample"]) for row in rows if row["axis"] in names)
    for axes, name in zip(panels, names):
        own = [row for row in rows if row["axis"] == name]
        x = [row["value"] for row in own]
        median, least, greatest = zip(*(row["cpu_us_per_sample"] for row in own))
        axes.fill_between(x, least, greatest, color=_OURS, alpha=0.2, linewidth=0)
        axes.plot(x, median, color=_OURS, marker="o", markersize=4)
        axes.set_title(_AXES.get(name, name), loc="left")
        axes.set_xscale("log", base=2)
        ticks = x[::2] if len(x) > 7 else x
        axes.set_xticks(ticks, [_short(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(0, 1.05 * top)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    _caption(figure, "CPU time of a sample in microseconds, in training the small MLP")
    return figure


def processes(rows: Sequence[Row]) -> Figure:
    """Bars of the samples per second by number of processes, a panel for each network.

    Args:
        rows: Of `distributed`: `workload`, `processes`, `threads`, and
            `samples_per_second` by contestant.
    """
    rows = [row for row in rows if row["threads"] == 1]
    names = [name for name in _PANELS if any(row["workload"] == name for row in rows)]
    height = 290
    figure, panels = _panels(
        len(names), height=height, left=46, gap=46, top=84, bottom=42
    )
    for axes, name in zip(panels, names):
        own = [row for row in rows if row["workload"] == name]
        for place, (contestant, label) in enumerate(_CREWS.items()):
            heights = [row["samples_per_second"][contestant] / 1000 for row in own]
            x = [number + 0.27 * (place - 1) for number in range(len(own))]
            colour = (_OURS, _SECOND, _OTHERS)[place]
            axes.bar(x, heights, width=0.25, color=colour, label=label)
        axes.set_title(_PANELS[name], loc="left")
        axes.set_xticks(range(len(own)), [str(row["processes"]) for row in own])
        axes.set_xlabel("processes")
        axes.grid(visible=False, axis="x")
    handles, labels = panels[0].get_legend_handles_labels()
    place = (10 / WIDTH, 1 - 44 / height)
    figure.legend(
        handles, labels, loc="center left", bbox_to_anchor=place, ncol=3, frameon=False
    )
    _caption(figure, "Training speed in thousands of samples per second")
    return figure


PICTURES = {
    "peers": speeds,
    "networks": speeds,
    "scaling": sizes,
    "distributed": processes,
}
"""How a part of the results is drawn."""


def _label(name: str) -> str:
    return _LABELS.get(name, CONTESTANTS[name].title)


def _factor(value: float) -> str:
    return f"{value:g}" if value >= 1 else f"1/{1 / value:g}"


def _short(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def _panels(
    columns: int,
    *,
    rows: int = 1,
    height: int,
    left: int,
    gap: int = 14,
    top: int = 66,
    bottom: int = 32,
) -> tuple[Figure, list[Axes]]:
    """A figure with panels, all measures in pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / _DPI, height / _DPI), dpi=_DPI, facecolor="white")
    right, between = 10, 56
    top = top if rows == 1 else 56
    across = (WIDTH - left - right - gap * (columns - 1)) / columns
    down = (height - top - bottom - between * (rows - 1)) / rows
    found = []
    for number in range(columns * rows):
        row, column = divmod(number, columns)
        x = left + column * (across + gap)
        y = bottom + (rows - 1 - row) * (down + between)
        place = (x / WIDTH, y / height, across / WIDTH, down / height)
        found.append(figure.add_axes(place))
    return figure, found


def _caption(figure: Figure, text: str) -> None:
    """Say above all panels what is drawn."""
    y = 1 - 16 / (figure.get_figheight() * _DPI)
    figure.text(10 / WIDTH, y, text, fontsize=10.5, va="center")


def draw(part: str, rows: Sequence[Row], folder: Path) -> Path | None:
    """Draw the picture of a part of the results.

    Args:
        part: Name of the part.
        rows: What was measured.
        folder: Where `benchmarks-<part>.svg` is written.

    Returns:
        The file; None for a part that has no picture.
    """
    if part not in PICTURES:
        return None
    import matplotlib

    path = folder / f"benchmarks-{part}.svg"
    with matplotlib.rc_context(_STYLE):
        figure = PICTURES[part](rows)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    lines = path.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line.rstrip() for line in lines)
    path.write_text(f"{text}\n", encoding="utf-8")
    return path
