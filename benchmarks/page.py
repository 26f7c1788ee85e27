# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks write into `docs/`: results, tables and pictures.

    python -m benchmarks.page

writes what comes from recorded results again: all pictures, and the summary of speeds.
Nothing is measured.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any, Mapping, Sequence

from . import pictures
from .contestants import CONTESTANTS, PLAIN
from .tables import table

DOCS = Path(__file__).parent.parent / "docs"
APPENDIX = "benchmarks-appendix.md"
"""Has the tables, between lines that name the command which writes them."""
RESULTS = "benchmarks.json"
"""Has the results that pictures are drawn from, by part."""
SUMMARIES = ("../README.md", "benchmarks.md")
"""Pages that have the summary of speeds, if they have the lines around it."""
_SUMMARY = "page"
_SUMMARISED = ("ipufit-default", "ipufit", "keras", "lightning-bare")
_COLUMNS = {
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
        >>> first, last = markers("steps")
        >>> print(replaced(f"a\n{first}\nold\n{last}\nb", "steps", "new"))
        a
        <!-- written by benchmarks.steps -->
        <BLANKLINE>
        new
        <BLANKLINE>
        <!-- end of steps -->
        b
    """
    first, last = markers(name)
    before, found, rest = page.partition(first + "\n")
    _, ended, after = rest.partition(last)
    if not found or not ended:
        raise ValueError(f"The page has no part between {first!r} and {last!r}.")
    return f"{before}{first}\n\n{text.strip()}\n\n{last}{after}"


def paragraphs(name: str) -> list[str]:
    """What a written part of the appendix has now."""
    first, last = markers(name)
    text = (DOCS / APPENDIX).read_text(encoding="utf-8")
    return text.partition(first)[2].partition(last)[0].strip().split("\n\n")


def write(
    command: str, settings: str, tables: Sequence[str], rows: Sequence[Mapping] = ()
) -> None:
    """Put results into the docs: the tables, the rows, and the picture of these.

    Args:
        command: The module and switches that wrote them; the part's name is last.
        settings: Machine, versions and number of turns.
        tables: Paragraphs and tables in Markdown; empty ones are left out.
        rows: What was measured, for `docs/benchmarks.json` and the picture.
    """
    appendix, part = DOCS / APPENDIX, command.split()[-1]
    text = "\n\n".join(one for one in (settings, *tables) if one)
    page = appendix.read_text(encoding="utf-8")
    appendix.write_text(replaced(page, command, text), encoding="utf-8")
    results = read()
    results[part] = {"measured_on": settings, "rows": list(rows)}
    (DOCS / RESULTS).write_text(dumps(results), encoding="utf-8")
    pictures.draw(part, rows, DOCS)
    write_summaries()


def summary(results: Mapping[str, Any]) -> str:
    """A table of training speeds, and of what `evaluate` reaches, for those in a hurry.

    Args:
        results: By part, as `read` gives them.
    """
    cells = {
        (row["contestant"], row["workload"], row["operation"]): row["cpu_speed"][0]
        for part in ("networks", "peers")
        for row in results[part]["rows"]
    }
    names = [name for name in _SUMMARISED if any(name == key[0] for key in cells)]
    lines = [
        [
            CONTESTANTS[name].title,
            *(_cell(cells.get((name, *column))) for column in _COLUMNS),
        ]
        for name in names
    ]
    return table([f"{CONTESTANTS[PLAIN].title} = 1", *_COLUMNS.values()], lines)


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def write_summaries() -> None:
    """Put the summary into the pages that have a place for it."""
    text = summary(read())
    for name in SUMMARIES:
        path = DOCS / name
        said = path.read_text(encoding="utf-8") if path.is_file() else ""
        if markers(_SUMMARY)[0] in said:
            path.write_text(replaced(said, _SUMMARY, text), encoding="utf-8")


def read() -> dict[str, Any]:
    """The results: by part, `measured_on` and `rows`."""
    return json.loads((DOCS / RESULTS).read_text(encoding="utf-8"))


def dumps(results: Mapping[str, Any]) -> str:
    """JSON with a line for each row, so that a change can be read.

    Example:
        >>> print(dumps({"a": {"measured_on": "b", "rows": [{"c": 1}, {"c": 2}]}}))
        {
        "a": {"measured_on": "b", "rows": [
        {"c": 1},
        {"c": 2}
        ]}
        }
        <BLANKLINE>
    """
    parts = []
    for name, part in results.items():
        rows = ",\n".join(json.dumps(row) for row in part["rows"])
        said = json.dumps(part["measured_on"])
        parts.append(
            f'{json.dumps(name)}: {{"measured_on": {said}, "rows": [\n{rows}\n]}}'
        )
    return "{\n" + ",\n".join(parts) + "\n}\n"


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


def main() -> None:
    """Write again what comes from recorded results."""
    write_summaries()
    for part, results in read().items():
        path = pictures.draw(part, results["rows"], DOCS)
        if path is not None:
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
