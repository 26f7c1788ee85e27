# SPDX-License-Identifier: Apache-2.0
"""Names of other libraries, and what to write in their place.

Errors about unknown arguments, attributes, metrics and losses look the name up in the
table `_hints.tsv`, and so do refusals of a LightningModule's methods. A row has the
places where the names may be tried, the names, and what to write. `hint` ignores
capitals and underscores.
"""

from __future__ import annotations

import functools
from pathlib import Path


def _key(name: str) -> str:
    return name.lower().replace("_", "")


@functools.lru_cache(maxsize=None)
def _rows() -> list[tuple[str, str, str]]:
    """Read place, name and way of each row, at the first call."""
    text = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8")
    return [
        (place, name, way)
        for places, names, way in (line.split("\t") for line in text.splitlines()[1:])
        for place in places.split()
        for name in names.split()
    ]


@functools.lru_cache(maxsize=None)
def _table() -> dict[tuple[str, str], str]:
    return {(place, _key(name)): way for place, name, way in _rows()}


@functools.lru_cache(maxsize=None)
def hints_at(place: str) -> dict[str, str]:
    """Return the hints of all names at a place, as they are written in the table.

    Example:
        >>> hints_at("Lightning.self")["global_rank"]
        'Leave it out: one program runs on all replicas and processes.'
    """
    return {name: hint(place, name) for at, name, _ in _rows() if at == place}


def hint(place: str, name: str) -> str:
    """Return a sentence with what to write for an unknown name; empty without a row.

    Example:
        >>> hint("fit", "bs")
        'Write batch_size=32.'
        >>> hint("compile", "jit_compile")
        'Leave it out: a program is always compiled.'
    """
    way = _table().get((place, _key(name)), "").format(name=name, lower=name.lower())
    if way.startswith("nothing: "):
        return f"Leave it out: {way[len('nothing: ') :]}."
    return f"Write {way}." if way else ""
