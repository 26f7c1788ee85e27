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
        is_at_terminal: Whether its output goes to a terminal, so that bars are drawn.
        is_default: Whether it is measured if nobody names contestants.
        tolerance: Factor on how far its figures may be from the plain loop's.
    """

    title: str
    home: str
    kind: str
    package: str | None = None
    imports: str | None = None
    is_at_terminal: bool = False
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
_KERAS = ("with_keras", "keras", "import keras")
_LIGHTNING = ("with_lightning", "lightning", "import lightning")
_POUTYNE = ("with_poutyne", "poutyne", "import poutyne")
_SKORCH = ("with_skorch", "skorch", "import skorch")
_ACCELERATED = (
    "with_pytorch_accelerated",
    "pytorch-accelerated",
    "import pytorch_accelerated",
)


def _entry(title: str, kind: str, place: tuple[str, str, str], **more: Any) -> Entry:
    home, package, imports = place
    return Entry(title, home, kind, package, imports, **more)


CONTESTANTS = {
    PLAIN: Entry("plain loop", "plain", "PlainLoop"),
    "ipufit-default": _entry("ipufit, nothing set", "IpufitNothingSet", _IPUFIT),
    "ipufit": _entry("ipufit, iterations set", "Ipufit", _IPUFIT),
    "ipufit-d1": _entry("ipufit, one update per call", "IpufitOneUpdate", _IPUFIT),
    "ipufit-bar": _entry(
        "ipufit with its bar",
        "IpufitWithBar",
        _IPUFIT,
        is_at_terminal=True,
        is_default=False,
    ),
    "ipufit-half": _entry(
        "float16, stochastic rounding", "IpufitHalf", _IPUFIT, **_HALF
    ),
    "ipufit-half-nearest": _entry(
        "float16, to the nearest", "IpufitHalfNearest", _IPUFIT, **_HALF
    ),
    "bare": Entry("limit: bare loop over slices", "limits", "BareLoop"),
    "folded": Entry("limit: folded, channels_last, fused", "limits", "FoldedLoop"),
    "compiled": Entry("limit: compiled updates", "compiled_limit", "CompiledLoop"),
    "keras": _entry("Keras", "Keras", _KERAS),
    "keras-compiled": _entry("Keras compiled", "KerasCompiled", _KERAS),
    "lightning": _entry("Lightning", "Lightning", _LIGHTNING, is_at_terminal=True),
    "lightning-bare": _entry("Lightning, everything off", "LightningBare", _LIGHTNING),
    "poutyne": _entry("poutyne", "Poutyne", _POUTYNE),
    "skorch": _entry("skorch", "Skorch", _SKORCH),
    "pytorch-accelerated": _entry(
        "pytorch-accelerated", "PytorchAccelerated", _ACCELERATED
    ),
}
DEFAULT = tuple(name for name, entry in CONTESTANTS.items() if entry.is_default)
