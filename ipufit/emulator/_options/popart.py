# SPDX-License-Identifier: Apache-2.0
"""`Options._Popart`: settings that PopART gets as they are."""

from __future__ import annotations

from typing import Any, TypeVar

from ipufit.emulator._ground.checks import require_type
from ipufit.emulator._options.storage import Freezable

_PopartT = TypeVar("_PopartT", bound="_PopartOptions")


class _PopartOptions(Freezable):
    """PopART session options by name, checked only when a model is compiled.

    Example:
        >>> from ipufit.emulator import Options
        >>> options = Options()
        >>> _ = options._Popart.set("enableOutlining", False)
        >>> options._Popart.options["enableOutlining"]
        False
    """

    options: dict[str, Any]

    def __init__(self) -> None:
        self._is_frozen = False
        self.options = {
            "instrumentWithHardwareCycleCounter": False,
            "rearrangeAnchorsOnHost": False,
        }

    def set(self: _PopartT, key: str, value: Any) -> _PopartT:
        """Set a session option by its PopART name."""
        self.checkIsFrozen()
        self.options[key] = value
        return self

    def setEngineOptions(self: _PopartT, engine_options: dict[str, str]) -> _PopartT:
        """Replace the options of Poplar's engine."""
        return self.set("engineOptions", engine_options)

    def setPatterns(
        self: _PopartT, patterns: dict[str, bool], level: int = 2
    ) -> _PopartT:
        """Choose PopART's graph patterns.

        Args:
            patterns: Names of patterns; each runs or not.
            level: Number of the set of patterns to start from, one of PopART's
                `PatternsLevel`.
        """
        require_type("patterns", patterns, dict)
        require_type("level", level, int)
        return self.set("patterns_level", level).set("patterns", patterns)

    def __repr__(self) -> str:
        return f"_PopartOptions({self.options!r})"
