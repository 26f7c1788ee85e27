# SPDX-License-Identifier: Apache-2.0
"""Environment variables that choose how the emulator runs, and its version."""

from __future__ import annotations

import math
import os
import re
from typing import Any, Callable

from .errors import createPoptorchError

__version__ = "3.4.0+emulator"
"""The version of PopTorch that is emulated."""

STRICT_VARIABLE = "IPUFIT_EMULATOR_STRICT"
FOLD_VARIABLE = "IPUFIT_EMULATOR_FOLD"
FOLD_MIB_VARIABLE = "IPUFIT_EMULATOR_FOLD_MIB"
CHANNELS_LAST_VARIABLE = "IPUFIT_EMULATOR_CHANNELS_LAST"
TIMEOUT_VARIABLE = "IPUFIT_PROCESS_TIMEOUT"
_MODEL_VARIABLES = ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL")
REPLICAS_VARIABLE = "IPUFIT_REPLICAS"


def _read(variable: str, default: object, kind: Callable[[str], Any], what: str) -> Any:
    """Convert an environment variable, or the default if it isn't set or is empty."""
    text = os.environ.get(variable, "").strip() or str(default)
    try:
        return kind(text)
    except (ValueError, OverflowError):
        raise createPoptorchError(
            f"{variable}={text!r} is no {what}, or unset it."
        ) from None


def is_on(variable: str, *, default: bool = False) -> bool:
    """Return whether an environment variable is an integer other than 0.

    Args:
        variable: Name of the variable.
        default: Result if the variable isn't set, or is empty.

    Raises:
        Error: If the variable holds no integer.

    Example:
        >>> import os
        >>> os.environ["POPTORCH_IPU_MODEL"] = "1"
        >>> is_on("POPTORCH_IPU_MODEL")
        True
        >>> del os.environ["POPTORCH_IPU_MODEL"]
        >>> is_on("POPTORCH_IPU_MODEL")
        False
    """
    return bool(_read(variable, int(default), int, "integer: set it to 1 or 0"))


def ipu_model_is_on() -> bool:
    """Return whether the environment asks for the IPU Model, the full or the small one.

    Example:
        >>> ipu_model_is_on()
        False
    """
    return any(is_on(variable) for variable in _MODEL_VARIABLES)


def fold_bytes(*, is_training: bool) -> int:
    """Return how many bytes the values of one fold may take.

    `IPUFIT_EMULATOR_FOLD_MIB` sets them in mebibytes. The default is 16 MiB in
    training, which keeps all values for the backward pass, and 8 MiB in inference.

    Raises:
        Error: If the variable holds no number.

    Example:
        >>> fold_bytes(is_training=True) // 2**20
        16
    """

    def to_bytes(mebibytes: str) -> int:
        return int(abs(float(mebibytes)) * 2**20)

    default = 16 if is_training else 8  # larger folds leave the caches
    what = "number of mebibytes: set it to one"
    return _read(FOLD_MIB_VARIABLE, default, to_bytes, what)


def is_strict() -> bool:
    """Return whether `IPUFIT_EMULATOR_STRICT` asks for strict mode.

    Raises:
        Error: If the variable holds no integer.

    Example:
        >>> is_strict()
        False
    """
    return is_on(STRICT_VARIABLE)


def whole_number(text: str) -> int | None:
    """Return the number that digits stand for; None if it is something else.

    Example:
        >>> whole_number("16"), whole_number("-1"), whole_number("9" * 5000)
        (16, None, None)
    """
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def process_timeout() -> float:
    """Return the seconds for which a process waits for the others of a run.

    `IPUFIT_PROCESS_TIMEOUT` sets them; the default is 600.

    Raises:
        Error: If the variable holds no number above 0.

    Example:
        >>> process_timeout()
        600.0
    """

    def to_seconds(text: str) -> float:
        if not 0.0 < float(text) < math.inf:
            raise ValueError
        return float(text)

    what = "number of seconds above 0: set it to one"
    return _read(TIMEOUT_VARIABLE, 600.0, to_seconds, what)
