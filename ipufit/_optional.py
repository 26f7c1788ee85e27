# SPDX-License-Identifier: Apache-2.0
"""Imports of packages that only some functions need."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import ConfigError


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
