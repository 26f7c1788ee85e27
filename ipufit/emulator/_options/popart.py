# SPDX-License-Identifier: Apache-2.0
"""`Options._Popart`: settings handed to PopART as they are."""

from __future__ import annotations

from typing import Any, TypeVar

from ipufit.emulator._ground.checks import require
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
        """Set one session option.

        Args:
            key: Its PopART name, unchecked until a model is compiled.
            value: Its value.

        Returns:
            The section.

        Raises:
            AttributeError: If the options are frozen.
        """
        self.checkIsFrozen()
        self.options[key] = value
        return self

    def setEngineOptions(self: _PopartT, engine_options: dict[str, str]) -> _PopartT:
        """Replace the Poplar engine options.

        Args:
            engine_options: Values by name.

        Returns:
            The section.

        Raises:
            AttributeError: If the options are frozen.
        """
        return self.set("engineOptions", engine_options)

    def setPatterns(
        self: _PopartT, patterns: dict[str, bool], level: int = 2
    ) -> _PopartT:
        """Choose PopART's graph patterns.

        Args:
            patterns: Whether each named pattern runs.
            level: The set of patterns to start from.

        Returns:
            The section.

        Raises:
            AssertionError: If `patterns` isn't a dict or `level` isn't an int.
            AttributeError: If the options are frozen.
        """
        require(isinstance(patterns, dict), f"`patterns` must be a dict: {patterns!r}.")
        require(isinstance(level, int), f"`level` must be an int: {level!r}.")
        return self.set("patterns_level", level).set("patterns", patterns)

    def __repr__(self) -> str:
        return f"_PopartOptions({self.options!r})"
