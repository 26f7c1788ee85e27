# SPDX-License-Identifier: Apache-2.0
"""Packages that only some callbacks need."""

from __future__ import annotations

import importlib
from typing import Any

from ipufit.errors import ConfigError


def need(module: str, who: str, install: str) -> Any:
    """Import what a callback needs, and say how to get it.

    Args:
        module: Its name.
        who: The callback.
        install: What to install with pip.

    Returns:
        The module.

    Raises:
        ConfigError: It can't be imported.

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
