# SPDX-License-Identifier: Apache-2.0
"""Where a model runs, as scripts ask for it."""

from __future__ import annotations

from ._trace_state import is_tracing


def isRunningOnIpu() -> bool:
    """Whether this code is being traced for a device.

    Returns:
        True only while an executor traces `forward`; False in the constructor of
        the module, on the host, and when a compiled model runs.

    Example:
        >>> isRunningOnIpu()
        False
    """
    return is_tracing()


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether there are real IPUs.

    Args:
        num_ipus: How many.

    Returns:
        False: emulated IPUs are no hardware, as PopTorch's own IPU Model isn't.

    Example:
        >>> ipuHardwareIsAvailable()
        False
    """
    return False


def ipuHardwareVersion() -> int:
    """The version of the IPUs.

    Raises:
        AssertionError: Always: there is no hardware here.

    Example:
        >>> ipuHardwareVersion()
        Traceback (most recent call last):
        AssertionError: No IPU hardware available on this system
    """
    raise AssertionError("No IPU hardware available on this system")
