# SPDX-License-Identifier: Apache-2.0
"""Lets one process write while the others wait, and tells all how it went."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, TypeVar

from ipufit.distributed import processes
from ipufit.errors import CheckpointError, ConfigError, UnsupportedError

T = TypeVar("T")

_ALIKE = {"ConfigError": ConfigError, "UnsupportedError": UnsupportedError}
"""Errors that others raise as they are: callers catch them."""


class _Outcome(NamedTuple):
    """How it went in process 0.

    Attributes:
        result: The value that was returned.
        error: Text of the error; None if it went well.
        kind: Class of the error.
        errno: The system's number of the error, if it has one.
    """

    result: Any = None
    error: str | None = None
    kind: str = ""
    errno: int | None = None


def written_by_one(write: Callable[[], T]) -> T:
    """Have process 0 write something, and wait for it in the other processes.

    Each process of a run must call this. A process without others writes by itself.

    Args:
        write: Writes, and returns something that can be pickled, such as the path;
            called in process 0 alone.

    Returns:
        The result of process 0, in every process, once it is written.

    Raises:
        Exception: `write` has raised it; in process 0.
        CheckpointError: `write` has raised an error with this text and `errno`; in the
            other processes. A ConfigError or an UnsupportedError is one there, too.
        ProcessError: Another process has ended.

    Example:
        >>> written_by_one(lambda: "run/update-00000010")
        'run/update-00000010'
    """
    everyone = processes()
    if not everyone.are_several:
        return write()
    if not everyone.is_first:
        outcome = everyone.first(_Outcome())
        if outcome.error is not None:
            raise _error(outcome)
        result: T = outcome.result
        return result
    try:
        result = write()
    except Exception as error:
        kind, errno = type(error).__name__, getattr(error, "errno", None)
        everyone.first(_Outcome(None, str(error), kind, errno))
        raise
    everyone.first(_Outcome(result))
    return result


def _error(outcome: _Outcome) -> Exception:
    if outcome.kind in _ALIKE:
        return _ALIKE[outcome.kind](outcome.error)
    error = CheckpointError(outcome.error)
    error.errno = outcome.errno
    return error
