# SPDX-License-Identifier: Apache-2.0
"""PopTorch's exceptions, and checks that fail as PopTorch's do.

The tree::

    Exception
    +-- Error                   anything the PopTorch layers refuse
        +-- RecoverableError    transient device error, says how to recover
        +-- UnrecoverableError  persistent device error
"""

from __future__ import annotations

__all__ = ["Error", "RecoverableError", "UnrecoverableError", "createPoptorchError"]


class Error(Exception):
    """Base of the errors PopTorch raises (PopTorch user guide, "Error handling").

    It derives from `Exception` directly: `except RuntimeError` doesn't see it.

    Args:
        message: The problem.
        type: Layer that raised it: `poptorch_py_error`, the default,
            `poptorch_cpp_error`, `popart_exception`, ...
        location: Stack of functions in that layer; empty if unknown.

    Example:
        >>> from ipufit.emulator import Error
        >>> error = Error("no loss found", type="poptorch_cpp_error")
        >>> str(error)
        "'poptorch_cpp_error': no loss found"
        >>> error.message, error.type, error.location
        ('no loss found', 'poptorch_cpp_error', '')
    """

    _layer = "poptorch_py_error"

    def __init__(
        self, message: str = "", type: str | None = None, location: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.type = type or self._layer
        self.location = location

    def __str__(self) -> str:
        return f"'{self.type}': {self.message}"


class RecoverableError(Error):
    """Error of a device after which the run can be restarted.

    Args:
        message: The problem.
        type: Layer that raised it, by default `poptorch_cpp_error`.
        location: Stack of functions in that layer; empty if unknown.
        recovery_action: `IPU_RESET`, `LINK_RESET`, `PARTITION_RESET` or
            `FULL_RESET`.

    Example:
        >>> from ipufit.emulator import RecoverableError
        >>> RecoverableError("link down", recovery_action="LINK_RESET").recovery_action
        'LINK_RESET'
    """

    _layer = "poptorch_cpp_error"

    def __init__(
        self,
        message: str = "",
        type: str | None = None,
        location: str = "",
        *,
        recovery_action: str = "IPU_RESET",
    ) -> None:
        super().__init__(message, type, location)
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """Error of a device that a reset doesn't cure.

    Example:
        >>> from ipufit.emulator import Error, UnrecoverableError
        >>> isinstance(UnrecoverableError("tile memory parity"), Error)
        True
    """

    _layer = "poptorch_cpp_error"


def createPoptorchError(msg: str) -> Error:
    """Return, but don't raise, an `Error` of type `poptorch_py_error`.

    Example:
        >>> from ipufit.emulator import createPoptorchError
        >>> str(createPoptorchError("too late"))
        "'poptorch_py_error': too late"
    """
    return Error(msg)


def require(condition: object, message: str) -> None:
    """Raise `AssertionError` unless `condition` is true.

    PopTorch validates most arguments with bare assertions, so scripts see
    `AssertionError`. An explicit raise keeps the check under `python -O`.

    Args:
        condition: Anything with a truth value.
        message: The problem, and how to solve it.

    Raises:
        AssertionError: If `condition` is false.

    Example:
        >>> require(1 > 0, "never shown")
    """
    if not condition:
        raise AssertionError(message)


def require_type(name: str, value: object, expected: type) -> None:
    """Raise `AssertionError` unless an argument is an instance of a type.

    Args:
        name: Name of the argument, for the message.
        value: Value of the argument.
        expected: Type that the argument must have; a subclass will do.

    Raises:
        AssertionError: If it isn't an instance.

    Example:
        >>> require_type("ipu_id", "1", int)
        Traceback (most recent call last):
        AssertionError: `ipu_id` must be of type int, not '1'.
    """
    require(
        isinstance(value, expected),
        f"`{name}` must be of type {expected.__name__}, not {value!r}.",
    )
