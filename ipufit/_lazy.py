# SPDX-License-Identifier: Apache-2.0
"""Import names of a package when they are first used."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Callable, Mapping, Sequence


def imported_at_first_use(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports later (PEP 562).

    The package also imports its names `if TYPE_CHECKING`, for type checkers.

    Args:
        homes: Modules of the package, and the names in each.

    Returns:
        The package's `__getattr__` and `__dir__`.

    Example:
        >>> find, _ = imported_at_first_use("ipufit", {"scalars": ["log"]})
        >>> find("log").__module__
        'ipufit.scalars'
        >>> find("leg")
        Traceback (most recent call last):
        AttributeError: module 'ipufit' has no attribute 'leg'
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{home_of[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names_and_modules() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return find, names_and_modules
