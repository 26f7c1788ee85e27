# SPDX-License-Identifier: Apache-2.0
"""How much the emulator tells, by PopTorch's names for levels."""

from __future__ import annotations

import logging
import os

LEVEL_VARIABLE = "POPTORCH_LOG_LEVEL"

logger = logging.getLogger("poptorch::python")

_OFF = logging.CRITICAL + 1
_LEVELS = {
    "TRACE_ALL": logging.DEBUG,
    "TRACE": logging.DEBUG,
    "DEBUG_IR": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "OFF": _OFF,
}
_NAMES_OF_INTEGERS = {0: "TRACE", 1: "DEBUG", 2: "INFO", 3: "WARN", 4: "ERR", 6: "OFF"}


def setLogLevel(level: str | int) -> None:
    """Say what to log, on standard error.

    Args:
        level: TRACE, TRACE_ALL, DEBUG, DEBUG_IR, INFO, WARN, ERR or OFF; or one of the
            integers 0 to 4 and 6, which PopTorch still takes for TRACE, DEBUG, INFO,
            WARN, ERR and OFF. Traces and IR dumps of a backend there are none: those
            levels are DEBUG.

    Raises:
        ValueError: It is none of these.

    Example:
        >>> setLogLevel("WARN")
        >>> setLogLevel(5)
        Traceback (most recent call last):
        ValueError: Invalid log level integer: 5, expected 0 to 4 or 6.
    """
    if isinstance(level, int):
        if level not in _NAMES_OF_INTEGERS:
            raise ValueError(
                f"Invalid log level integer: {level}, expected 0 to 4 or 6."
            )
        level = _NAMES_OF_INTEGERS[level]
    if level not in _LEVELS:
        raise ValueError(
            f"Unknown log level: {level}. Valid values are DEBUG, ERR, INFO, OFF, "
            "TRACE and WARN"
        )
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter("[%(name)s] [%(levelname)s] %(message)s")
        )
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(_LEVELS[level])


def apply_environment() -> None:
    """Take the level from `POPTORCH_LOG_LEVEL`, if it is set."""
    level = os.environ.get(LEVEL_VARIABLE)
    if level:
        setLogLevel(level)
