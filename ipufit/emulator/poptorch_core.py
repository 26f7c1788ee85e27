# SPDX-License-Identifier: Apache-2.0
"""PopTorch's compiled module, as far as scripts and tests use it."""

from __future__ import annotations

import enum
from typing import NoReturn

from ipufit.emulator._layout.pod import isRunningOnIpu
from ipufit.emulator._options.popart_keys import (
    validate_popart_options as _validateOptions,
)
from ipufit.emulator.errors import Error, RecoverableError, UnrecoverableError

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
    """Layers below PopTorch, for `_throwTestError`.

    Example:
        >>> TestErrorType.PoplarLinkError.name
        'PoplarLinkError'
    """

    __test__ = False  # pytest: the name starts with Test, but it isn't one

    Poptorch = 0
    Popart = 1
    PopartInternal = 2
    Poplibs = 3
    PoplarUnrecoverable = 4
    PoplarUnknown = 5
    PoplarRecoverableFullReset = 6
    PoplarLinkError = 7


_TYPES = {
    TestErrorType.Poptorch: "poptorch_cpp_error",
    TestErrorType.Popart: "popart_exception",
    TestErrorType.PopartInternal: "popart_internal_exception",
    TestErrorType.Poplibs: "poplibs_exception",
    TestErrorType.PoplarUnrecoverable: "poplar_unrecoverable_runtime_error",
    TestErrorType.PoplarUnknown: "poplar_unknown_runtime_error",
    TestErrorType.PoplarRecoverableFullReset: "poplar_recoverable_runtime_error",
    TestErrorType.PoplarLinkError: "poplar_link_error",
}
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
    layer = _TYPES[error_type]
    message = f"An error for tests, {error_type.name}"
    if error_type is TestErrorType.PoplarLinkError:
        message += ". Output: -lfoo not found"  # as the linker's output would be
    error = _CLASSES.get(error_type, Error)(message, layer, _LOCATION)
    if isinstance(error, RecoverableError):
        error.recovery_action = "FULL_RESET"
    error.args = (f"{error}\nError raised in:\n{_LOCATION}",)
    raise error
