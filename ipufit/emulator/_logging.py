# SPDX-License-Identifier: Apache-2.0
"""The emulator's logger, with PopTorch's names for levels."""

from __future__ import annotations

import logging
import os
import sys

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
    """Set the level from which messages are logged on standard error.

    Args:
        level: TRACE, TRACE_ALL, DEBUG, DEBUG_IR, INFO, WARN, ERR or OFF; or one of the
            integers 0 to 4 and 6, which PopTorch still takes for TRACE, DEBUG, INFO,
            WARN, ERR and OFF. There is no backend to trace or dump: TRACE, TRACE_ALL
            and DEBUG_IR are the same as DEBUG.

    Raises:
        ValueError: If there is no such level.

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
    logger.setLevel(_LEVELS[level])


class _Formatter(logging.Formatter):
    """Formats a record as time, logger and level in brackets, then the message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        time = f"{self.formatTime(record, '%H:%M:%S')}.{int(record.msecs):03d}"
        level = record.levelname.lower()
        return f"[{time}] [{record.name}] [{level}] {record.message}"


class _StandardError(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler that looks up `sys.stderr` each time: pytest replaces it per test."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # not `setStream`, which flushes the old one
        super().emit(record)


def _is_new(record: logging.LogRecord) -> bool:
    """Whether torchrun's first process doesn't log the same; PopTorch logs in each."""
    rank = os.environ.get("RANK") if "TORCHELASTIC_RUN_ID" in os.environ else None
    return rank in (None, "0") or str(record.msg).startswith("Process %d")


def start_logging() -> None:
    """Log to standard error from level `POPTORCH_LOG_LEVEL` on, by default WARN.

    The logger is PopTorch's: one that is imported beside the emulator has set it up.
    """
    if not logger.handlers:
        handler = _StandardError()
        handler.setFormatter(_Formatter())
        handler.addFilter(_is_new)
        logger.addHandler(handler)
        setLogLevel(os.environ.get("POPTORCH_LOG_LEVEL") or "WARN")
