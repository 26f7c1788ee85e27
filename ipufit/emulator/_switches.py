# SPDX-License-Identifier: Apache-2.0
"""Environment variables that turn something on."""

from __future__ import annotations

import os

from .errors import createPoptorchError

STRICT_VARIABLE = "IPUFIT_EMULATOR_STRICT"


def is_on(variable: str) -> bool:
    """Whether an environment variable is an integer other than 0.

    Args:
        variable: Its name.

    Returns:
        False if it isn't set, or is empty.

    Raises:
        Error: It is no integer.

    Example:
        >>> import os
        >>> os.environ["POPTORCH_IPU_MODEL"] = "1"
        >>> is_on("POPTORCH_IPU_MODEL")
        True
        >>> del os.environ["POPTORCH_IPU_MODEL"]
        >>> is_on("POPTORCH_IPU_MODEL")
        False
    """
    text = os.environ.get(variable, "").strip() or "0"
    try:
        return int(text) != 0
    except ValueError:
        raise createPoptorchError(
            f"{variable}={text!r} is no integer: set it to 1 or 0, or unset it."
        ) from None


def is_strict() -> bool:
    """Whether `IPUFIT_EMULATOR_STRICT` asks for strict mode.

    Raises:
        Error: It is no integer.

    Example:
        >>> is_strict()
        False
    """
    return is_on(STRICT_VARIABLE)
