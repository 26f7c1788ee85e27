# SPDX-License-Identifier: Apache-2.0
"""Numbers and strings of a module that a compiled program has baked in."""

from __future__ import annotations

from typing import Any

import torch

from ipufit.errors import ConfigError

_PLAIN = (bool, int, float, str)


class BakedIn:
    """The plain attributes of a module and its children, as a program knows them.

    `forward` runs once in Python, when it is traced: what it read of the module's
    numbers and strings is a part of the program, and a change is never seen.

    Args:
        module: The user's.

    Example:
        >>> module = torch.nn.Dropout(0.5)
        >>> baked_in = BakedIn(module)
        >>> module.p = 0.25
        >>> baked_in.changed()
        ('p', 0.5, 0.25)
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._values: dict[str, tuple[dict[str, Any], str, Any]] = {}
        for path, child in module.named_modules():
            attributes = vars(child)
            for name, value in attributes.items():
                is_own = name != "training" and not name.startswith("_")
                if is_own and isinstance(value, _PLAIN):
                    full = f"{path}.{name}" if path else name
                    self._values[full] = attributes, name, value

    def changed(self) -> tuple[str, Any, Any] | None:
        """The first that has changed: name, old and new value; None if none has."""
        for full, (attributes, name, value) in self._values.items():
            now = attributes.get(name)
            if now is not value and now != value:
                return full, value, now
        return None

    def absorb(self, before: BakedIn) -> None:
        """Take over what `forward` itself has changed meanwhile, such as a counter.

        Args:
            before: The module's values before another program was traced.
        """
        for full, (attributes, name, value) in before._values.items():
            now = attributes.get(name)
            if now != value and full in self._values:
                self._values[full] = attributes, name, now

    def check(self) -> None:
        """Refuse to go on with a value that the program doesn't have.

        Raises:
            ConfigError: One has changed.
        """
        changed = self.changed()
        if changed is not None:
            name, old, new = changed
            raise ConfigError(
                f"module.{name} was {old!r} when the model was compiled and is {new!r} "
                "now: the compiled program has the old value baked in. Change it "
                "between fits, make it a buffer (register_buffer), or pass it as an "
                "input."
            )
