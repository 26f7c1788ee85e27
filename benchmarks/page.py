# SPDX-License-Identifier: Apache-2.0
"""Where the benchmarks write into `docs/`."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Sequence

from .contestants import CONTESTANTS, PLAIN
from .results import Row
from .tables import table

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "benchmarks.md"
SUMMARISED = ("ipufit-default", "ipufit", "keras", "lightning")
COLUMNS = {
    ("W1", "train"): "MNIST CNN",
    ("W3", "train"): "10 micro-batches",
    ("W2", "train"): "small MLP",
    ("lstm", "train"): "LSTM",
    ("transformer", "train"): "transformer",
    ("resnet18", "train"): "ResNet-18",
    ("W1", "evaluate"): "`evaluate`, MNIST CNN",
    ("W2", "evaluate"): "`evaluate`, small MLP",
}


def markers(name: str) -> tuple[str, str]:
    """The lines around a written part."""
    return f"<!-- written by benchmarks.{name} -->", f"<!-- end of {name} -->"


def replaced(page: str, name: str, text: str) -> str:
    r"""A page with another text in a part.

    Raises:
        ValueError: The page has no such part.

    Example:
        >>> first, last = markers("start")
        >>> print(replaced(f"a\n{first}\nold\n{last}\nb", "start", "new"))
        a
        <!-- written by benchmarks.start -->
        <BLANKLINE>
        new
        <BLANKLINE>
        <!-- end of start -->
        b
    """
    first, last = markers(name)
    before, found, rest = page.partition(first + "\n")
    _, ended, after = rest.partition(last)
    if not found or not ended:
        raise ValueError(f"The page has no part between {first!r} and {last!r}.")
    return f"{before}{first}\n\n{text.strip()}\n\n{last}{after}"


def write(name: str, *paragraphs: str, path: Path = PAGE) -> None:
    """Put paragraphs and tables into a part of a page; empty ones are left out."""
    text = "\n\n".join(one for one in paragraphs if one)
    page = path.read_text(encoding="utf-8")
    path.write_text(replaced(page, name, text), encoding="utf-8")


def summary(rows: Sequence[Row]) -> str:
    """A table of training speeds, and of what `evaluate` reaches."""
    cells = {
        (row.contestant, row.workload, row.operation): row.speed.median for row in rows
    }
    lines = [
        [
            CONTESTANTS[name].title,
            *(_cell(cells.get((name, *column))) for column in COLUMNS),
        ]
        for name in SUMMARISED
        if any(name == key[0] for key in cells)
    ]
    return table([f"{CONTESTANTS[PLAIN].title} = 1", *COLUMNS.values()], lines)


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def machine() -> str:
    """Processor and versions: what figures depend on, and nothing that names a host."""
    packages = ["torch", "numpy"]
    packages += [entry.package for entry in CONTESTANTS.values() if entry.package]
    versions = []
    for package in dict.fromkeys(packages):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            if package == "ipufit":  # run from its source
                import ipufit

                versions.append(f"ipufit {ipufit.__version__}")
    python = platform.python_version()
    return f"{_processor()}; Python {python}, {', '.join(versions)}."


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    cores = f"{len(models)} cores" if models else "unknown number of cores"
    return f"{models[0] if models else platform.machine()}, {cores}"
