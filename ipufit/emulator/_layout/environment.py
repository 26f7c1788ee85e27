# SPDX-License-Identifier: Apache-2.0
"""Functions by which scripts ask where a model runs."""

from __future__ import annotations

from ipufit.emulator._layout.pod import POD
from ipufit.emulator._layout.target import ipu_model_is_on
from ipufit.emulator._tracing.trace_state import is_tracing

_MK2 = 2


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
    """Whether the pod has `num_ipus` IPUs, in use or not.

    The emulated pod counts as hardware, as it stands for the pod that a script was
    written for. It has 64 IPUs, or as many as `IPUFIT_EMULATOR_IPUS` says.

    Returns:
        False too while `POPTORCH_IPU_MODEL` or `POPTORCH_SMALL_IPU_MODEL` ask for the
        IPU Model, as in PopTorch.

    Example:
        >>> ipuHardwareIsAvailable(), ipuHardwareIsAvailable(1000)
        (True, False)
    """
    return not ipu_model_is_on() and num_ipus <= POD.num_ipus


def ipuHardwareVersion() -> int:
    """The version of the IPUs.

    Returns:
        2, the Mk2 that PopTorch compiles for by default.

    Raises:
        AssertionError: There is no hardware: the environment asks for the IPU Model.

    Example:
        >>> ipuHardwareVersion()
        2
    """
    if not ipuHardwareIsAvailable():
        raise AssertionError("No IPU hardware available on this system")
    return _MK2
