# SPDX-License-Identifier: Apache-2.0
"""`docs/benchmarks.md`: prose by hand, with parts that the benchmarks write."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

from .contestants import CONTESTANTS

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "benchmarks.md"


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


def write(name: str, text: str, plots: dict[str, str] | None = None) -> None:
    """Put a text, and plots by file name, into the docs."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(replaced(page, name, text), encoding="utf-8")
    for file, plot in (plots or {}).items():
        (DOCS / file).write_text(plot, encoding="utf-8")


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
