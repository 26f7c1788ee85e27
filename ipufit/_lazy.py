# SPDX-License-Identifier: Apache-2.0
"""Import names of packages, and optional packages, at their first use."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Callable, Mapping, Sequence

from .errors import ConfigError


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
        >>> find, _ = imported_at_first_use("ipufit", {"mixing": ["Mixing"]})
        >>> find("Mixing").__module__
        'ipufit.mixing'
        >>> find("Mixin")
        Traceback (most recent call last):
        AttributeError: module 'ipufit' has no attribute 'Mixin'
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


def need(module: str, who: str, install: str) -> Any:
    """Import a module of an optional package, or say how to install it.

    Args:
        module: Name of the module.
        who: Name of the callback or function that needs it, for the message.
        install: Argument of `pip install`, for the message.

    Raises:
        ConfigError: If the module can't be imported.

    Example:
        >>> need("no_such_module", "Gauge", "gauges")
        Traceback (most recent call last):
        ipufit.errors.ConfigError: Gauge needs a package that isn't installed: ...
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{who} needs a package that isn't installed: pip install {install} "
            f"({error})"
        ) from error
