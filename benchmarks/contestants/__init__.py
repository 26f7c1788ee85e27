# SPDX-License-Identifier: Apache-2.0
"""Who is measured. Modules are imported in the process that measures them."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

PLAIN = "plain"


@dataclass(frozen=True)
class Entry:
    """A contestant, and where it is.

    Attributes:
        title: What it is, for readers.
        home: Module under `benchmarks.contestants`.
        kind: Name of the class in it.
        package: The distribution it needs beside torch; None for none.
        imports: The statement that brings its names; None if torch is enough.
        is_default: Whether it is measured if nobody names contestants.
        tolerance: Factor on how far its figures may be from the plain loop's.
    """

    title: str
    home: str
    kind: str
    package: str | None = None
    imports: str | None = None
    is_default: bool = True
    tolerance: float = 1.0

    @property
    def is_installed(self) -> bool:
        """Whether the package it needs is there."""
        if self.imports is None:
            return True
        top = self.imports.split()[1].partition(".")[0]
        return importlib.util.find_spec(top) is not None

    def load(self) -> Any:
        """Its class."""
        module = importlib.import_module(f"benchmarks.contestants.{self.home}")
        return getattr(module, self.kind)


_IPUFIT = ("with_ipufit", "ipufit", "from ipufit import IPUConfig, IPUModel")
_HALF = {"is_default": False, "tolerance": 4.0}


def _entry(title: str, kind: str, place: tuple[str, str, str], **more: Any) -> Entry:
    home, package, imports = place
    return Entry(title, home, kind, package, imports, **more)


CONTESTANTS = {
    PLAIN: Entry("plain loop", "plain", "PlainLoop"),
    "ipufit-default": _entry("ipufit, nothing set", "IpufitNothingSet", _IPUFIT),
    "ipufit": _entry("ipufit, iterations set", "Ipufit", _IPUFIT),
    "ipufit-half": _entry(
        "float16, stochastic rounding", "IpufitHalf", _IPUFIT, **_HALF
    ),
    "ipufit-half-nearest": _entry(
        "float16, to the nearest", "IpufitHalfNearest", _IPUFIT, **_HALF
    ),
    "tuned": Entry("tuned by hand", "tuned", "TunedLoop"),
    "keras": _entry("Keras", "Keras", ("with_keras", "keras", "import keras")),
    "lightning": _entry(
        "Lightning, everything off",
        "Lightning",
        ("with_lightning", "lightning", "import lightning"),
    ),
    "poutyne": _entry(
        "poutyne", "Poutyne", ("with_poutyne", "poutyne", "import poutyne")
    ),
}
DEFAULT = tuple(name for name, entry in CONTESTANTS.items() if entry.is_default)
