# SPDX-License-Identifier: Apache-2.0
"""Who is measured. Modules are imported in the process that measures them."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from typing import Any, Mapping

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
        environment: Variables of its process.
        is_at_terminal: Whether its output goes to a terminal, so that bars are drawn.
    """

    title: str
    home: str
    kind: str
    package: str | None = None
    imports: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    is_at_terminal: bool = False

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


_IPUFIT = ("with_ipufit", "Ipufit", "ipufit", "from ipufit import IPUConfig, IPUModel")

CONTESTANTS = {
    PLAIN: Entry("plain loop", "plain", "PlainLoop"),
    "ipufit": Entry("ipufit", *_IPUFIT),
}
DEFAULT = tuple(CONTESTANTS)
