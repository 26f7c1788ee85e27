# SPDX-License-Identifier: Apache-2.0
"""PopTorch's compiled module, as far as scripts and tests use it."""

from __future__ import annotations

import enum
from typing import NoReturn

from ._options_keys import validate_popart_options as _validateOptions
from .core.pod import isRunningOnIpu
from .errors import Error, RecoverableError, UnrecoverableError

__all__ = [
    "Error",
    "RecoverableError",
    "TestErrorType",
    "UnrecoverableError",
    "_throwTestError",
    "_validateOptions",
    "isCompilingWithDispatcher",
    "poptorchAtExit",
]


def isCompilingWithDispatcher() -> bool:
    """Return whether a model is being compiled.

    Example:
        >>> isCompilingWithDispatcher()
        False
    """
    return isRunningOnIpu()


def poptorchAtExit() -> None:
    """Do nothing.

    PopTorch calls it when Python exits, to tell its backend that Python's objects are
    deleted. The emulator's IPUs end with the process.

    Example:
        >>> poptorchAtExit()
    """


class TestErrorType(enum.Enum):
    """Layers below PopTorch and the types of their errors, for `_throwTestError`.

    Example:
        >>> TestErrorType.PoplarLinkError.name
        'PoplarLinkError'
    """

    __test__ = False  # pytest: the name starts with Test, but it isn't one

    Poptorch = "poptorch_cpp_error"
    Popart = "popart_exception"
    PopartInternal = "popart_internal_exception"
    Poplibs = "poplibs_exception"
    PoplarUnrecoverable = "poplar_unrecoverable_runtime_error"
    PoplarUnknown = "poplar_unknown_runtime_error"
    PoplarRecoverableFullReset = "poplar_recoverable_runtime_error"
    PoplarLinkError = "poplar_link_error"


_CLASSES = {
    TestErrorType.PoplarRecoverableFullReset: RecoverableError,
    TestErrorType.PoplarUnrecoverable: UnrecoverableError,
}
_LOCATION = "[0] throwTestError::bottomLevel\n[1] throwTestError::topLevel"


def _throwTestError(error_type: TestErrorType) -> NoReturn:
    """Raise an error as a layer below PopTorch would, to test error handling.

    Raises:
        RecoverableError: For `PoplarRecoverableFullReset`.
        UnrecoverableError: For `PoplarUnrecoverable`.
        Error: For the others.

    Example:
        >>> try:
        ...     _throwTestError(TestErrorType.PoplarRecoverableFullReset)
        ... except RecoverableError as error:
        ...     error.recovery_action
        'FULL_RESET'
    """
    message = f"An error for tests, {error_type.name}"
    if error_type is TestErrorType.PoplarLinkError:
        message += ". Output: -lfoo not found"  # as the linker's output would be
    error = _CLASSES.get(error_type, Error)(message, error_type.value, _LOCATION)
    if isinstance(error, RecoverableError):
        error.recovery_action = "FULL_RESET"
    error.args = (f"{error}\nError raised in:\n{_LOCATION}",)
    raise error
