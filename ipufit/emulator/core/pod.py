# SPDX-License-Identifier: Apache-2.0
"""Where a program runs: on IPUs of the emulated pod, the IPU Model, or no device.

The emulated pod stands for hardware. The IPU Model is Graphcore's own simulator: no
pod, no scarcity, and no cycle counts (PopTorch, `CompilerImpl.cpp`).

Programs hold IPUs from attach to detach. Two of them fit side by side or take
turns, exactly as on hardware, so a forgotten `detachFromDevice()` shows here too.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
import weakref
from typing import Any, Callable

from .._logging import logger
from .._switches import ipu_model_is_on, is_on, whole_number
from ..enums import ConnectionType
from ..errors import createPoptorchError
from ..options import Options, Settings
from .recording import is_tracing

MAX_IPUS_PER_PROCESS = 64
NUM_IPUS_VARIABLE = "IPUFIT_EMULATOR_IPUS"
_WAIT_VARIABLE = "POPTORCH_WAIT_FOR_IPU"
_VERSION_VARIABLE = "POPTORCH_IPU_MODEL_VERSION"
_VERSIONS = ("ipu1", "ipu2", "ipu21")
_HARDWARE_ONLY = {
    "enableFloatingPointChecks": "Precision.enableFloatingPointExceptions",
    "enableStochasticRounding": "Precision.enableStochasticRounding",
}
"""Keys of settings that PopART has for hardware only (`irlowering.cpp`) -> options."""
_SECONDS_BETWEEN_TRIES = 15.0


held_ipus: set[int] = set()
"""The IPUs that programs of this process hold."""


def count_ipus() -> int:
    """Count the IPUs of the pod: `IPUFIT_EMULATOR_IPUS`, or 64.

    Example:
        >>> count_ipus()
        64
    """
    text = os.environ.get(NUM_IPUS_VARIABLE, str(MAX_IPUS_PER_PROCESS))
    count = whole_number(text)
    if not count:
        raise createPoptorchError(
            f"{NUM_IPUS_VARIABLE}={text!r} is not a number of IPUs: set it to 1 or "
            "more, or unset it."
        )
    return count


def lease(owner: object, count: int, first: int | None = None) -> Callable[[], Any]:
    """Acquire IPUs, and return a function that releases them.

    The IPUs are also released when `owner` is garbage-collected.

    With `POPTORCH_WAIT_FOR_IPU=1` it waits for IPUs that are in use, forever if need
    be, and tries every 15 seconds.

    Args:
        first: Number of the first IPU; None takes any.

    Raises:
        Error: The pod has fewer IPUs, or they are in use.
    """
    total = count_ipus()
    wanted = range(total) if first is None else range(total)[first : first + count]
    for attempt in itertools.count():
        free = [ipu for ipu in wanted if ipu not in held_ipus]
        if len(free) >= count:
            held_ipus.update(free[:count])
            return weakref.finalize(owner, held_ipus.difference_update, free[:count])
        if attempt == 0:
            gc.collect()  # a holder may be gone without Python knowing
        elif (first or 0) + count <= total and is_on(_WAIT_VARIABLE):
            logger.warning(
                "No IPU available, sleeping for %g seconds (%s is set).",
                _SECONDS_BETWEEN_TRIES,
                _WAIT_VARIABLE,
            )
            time.sleep(_SECONDS_BETWEEN_TRIES)
        else:
            break
    what = f"{count} IPU(s)" if first is None else f"device Id {first}"
    advice = "Detach or destroy another model first."
    if count > total:
        advice = f"There are only {total}: use fewer stages or replicas."
    raise createPoptorchError(
        f"Failed to acquire {what}: {len(held_ipus)} of the {total} emulated IPUs "
        f"are in use. {advice}"
    )


def reserved_ipus(options: Options, num_ipus: int) -> int:
    """Return how many IPUs the pod reserves for a program that uses `num_ipus`.

    Returns:
        A power of two, unless there is no device; 0 for the IPU Model.

    Raises:
        Error: There are too many IPUs, hardware has no group of that size, or
            PopTorch can't combine the options.

    Example:
        >>> reserved_ipus(Options().autoRoundNumIPUs(True), num_ipus=3)
        4
        >>> reserved_ipus(Options().useIpuModel(True), num_ipus=3)
        0
    """
    if num_ipus > MAX_IPUS_PER_PROCESS:
        raise createPoptorchError(
            f"Too many IPUs requested ({num_ipus}). Experiments that need more "
            f"than {MAX_IPUS_PER_PROCESS} IPUs require distributed execution."
        )
    settings = Settings(options)
    is_model = settings.is_ipu_model
    if options.exists("use_model"):
        logger.info(
            "From the user configuration: Ipu model: %s",
            "Enabled" if is_model else "Disabled",
        )
    is_offline = options.connection_type == ConnectionType.Never.value
    if is_model:
        version = os.environ.get(_VERSION_VARIABLE, "ipu2")
        if version not in _VERSIONS:
            raise createPoptorchError(
                f"{_VERSION_VARIABLE}={version!r} is no version of an IPU. There "
                f"are {', '.join(_VERSIONS)}."
            )
        if is_offline:
            raise createPoptorchError(
                "ConnectionType.Never is not supported for the IPU Model: there is "
                "no device to stay away from. Use Options.useIpuModel(False), or "
                "another connection type."
            )
        if settings.cache_dir is not None:
            logger.warning("Executables of the IPU Model are not cached.")
        for key, what in _HARDWARE_ONLY.items():
            if options._Popart.options.get(key):
                logger.warning("%s: not on the IPU Model, which goes without.", what)
    elif is_offline and options.exists("ipu_id"):
        raise createPoptorchError(
            "An offline target (ConnectionType.Never) is no device, so it can't "
            f"be the one that Options.useIpuId({options.ipu_id}) asks for."
        )
    if settings.counts_cycles and (is_model or is_offline):
        raise createPoptorchError(
            "Cycle count logging is only supported on actual IPU hardware. It is "
            f"{'the IPU Model' if is_model else 'an offline target'} here: use "
            "Options.logCycleCount(False)."
        )
    if is_model:
        return 0
    # Hardware has groups of powers of two only.
    power = 1 << (num_ipus - 1).bit_length()
    if power != num_ipus and not is_offline:
        if not options.auto_round_num_ipus:
            raise createPoptorchError(
                f"The model specifies the use of {num_ipus} IPUs, however PopTorch "
                f"must reserve a minimum of {power} in order to allow the model to "
                "run, because PopTorch must reserve a power of 2 or maximum of 64 "
                "IPUs per process. Please reconfigure your model to use a "
                "different number of IPUs or set "
                "poptorch.Options().autoRoundNumIPUs(True)."
            )
        logger.warning(
            "Reserving %d IPUs for a model that uses %d, because hardware has "
            "groups of powers of two only: %d are idle.",
            power,
            num_ipus,
            power - num_ipus,
        )
        num_ipus = power
    return num_ipus


def isRunningOnIpu() -> bool:
    """Return whether this code is being traced for a device.

    Returns:
        True only while an executor traces `forward`; False in the constructor of
        the module, on the host, and when a compiled model runs.

    Example:
        >>> isRunningOnIpu()
        False
    """
    return is_tracing()


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Return whether the pod has `num_ipus` IPUs, in use or not.

    The emulated pod counts as hardware, as it stands for the pod that a script was
    written for. It has 64 IPUs, or as many as `IPUFIT_EMULATOR_IPUS` says.

    Returns:
        False too while `POPTORCH_IPU_MODEL` or `POPTORCH_SMALL_IPU_MODEL` ask for the
        IPU Model, as in PopTorch.

    Example:
        >>> ipuHardwareIsAvailable(), ipuHardwareIsAvailable(1000)
        (True, False)
    """
    return not ipu_model_is_on() and num_ipus <= count_ipus()


def ipuHardwareVersion() -> int:
    """Return the version of the IPUs.

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
    return 2
