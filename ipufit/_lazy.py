# SPDX-License-Identifier: Apache-2.0
"""Import names of packages, and optional packages, at their first use."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from typing import Any, Callable


def imported_at_first_use(
    package: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports later.

    The names are those that the package's stub, `__init__.pyi`, imports. Type checkers
    and editors read the same file. `__all__` lacks modules that the stub imports, so
    that `import *` imports only those that its names need.

    Example:
        >>> find, _, _ = imported_at_first_use("ipufit")
        >>> find("Mixing").__module__
        'ipufit.mixing'
        >>> find("Mixin")
        Traceback (most recent call last):
        AttributeError: module 'ipufit' has no attribute 'Mixin'. Did you mean 'Mixing'?
    """
    stub = ast.parse(pkgutil.get_data(package, "__init__.pyi") or b"")
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    home_of = {alias.name: node.module for node in imports for alias in node.names}

    def find(name: str) -> Any:
        if name not in home_of:
            errors = importlib.import_module("ipufit.errors")
            what = f"module {package!r}"
            raise errors.unknown_attribute(what, package, name, home_of)
        home = home_of[name]
        value = importlib.import_module(f".{home or name}", package)
        if home is not None:
            value = getattr(value, name)
            setattr(sys.modules[package], name, value)
        return value

    names = sorted(name for name, home in home_of.items() if home is not None)
    return find, lambda: sorted(home_of), names


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
        errors = importlib.import_module("ipufit.errors")
        raise errors.ConfigError(
            f"{who} needs a package that isn't installed: pip install {install} "
            f"({error})"
        ) from error
