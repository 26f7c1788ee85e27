# SPDX-License-Identifier: Apache-2.0
"""Names of other libraries, and what to write in their place.

Errors about unknown arguments, attributes, metrics and losses look the name up in the
table `_hints.tsv`. A row has the places where the names may be tried, the names, and
what to write. Capitals and underscores don't matter.
"""

from __future__ import annotations

import functools
from pathlib import Path


def _key(name: str) -> str:
    return name.lower().replace("_", "")


@functools.lru_cache(maxsize=None)
def _table() -> dict[tuple[str, str], str]:
    """Read the rows, at the first error that asks for one."""
    text = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines()[1:]]
    return {
        (place, _key(name)): way
        for places, names, way in rows
        for place in places.split()
        for name in names.split()
    }


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
