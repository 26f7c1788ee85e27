# SPDX-License-Identifier: Apache-2.0
"""The target that a program is compiled for: IPUs, the IPU Model, or no device.

The emulated pod stands for hardware. The IPU Model is Graphcore's own simulator: no
pod, no scarcity, and no cycle counts (PopTorch, `CompilerImpl.cpp`).
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from ipufit.emulator._ground.switches import is_on
from ipufit.emulator._layout.pod import MAX_IPUS_PER_PROCESS
from ipufit.emulator._options.options import Options
from ipufit.emulator.enums import ConnectionType
from ipufit.emulator.errors import createPoptorchError

logger = logging.getLogger("poptorch::python")

MODEL_VARIABLES = ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL")
VERSION_VARIABLE = "POPTORCH_IPU_MODEL_VERSION"
_MODEL_VERSIONS = ("ipu1", "ipu2", "ipu21")


@dataclass(frozen=True)
class Target:
    """The target of one program.

    Attributes:
        is_model: Whether it is the IPU Model.
        is_offline: Whether there is no device to run on: `ConnectionType.Never`.
        num_ipus: Number of IPUs that the pod reserves; 0 for the IPU Model.
        first_ipu: Number of the first of these IPUs; None takes any.
    """

    is_model: bool
    is_offline: bool
    num_ipus: int
    first_ipu: int | None

    @classmethod
    def of(cls, options: Options, num_ipus: int) -> Target:
        """Choose the target for a program that uses `num_ipus` IPUs.

        Raises:
            Error: There are too many IPUs, hardware has no group of that size, or
                PopTorch can't combine the options.

        Example:
            >>> Target.of(Options().autoRoundNumIPUs(True), num_ipus=3).num_ipus
            4
            >>> Target.of(Options().useIpuModel(True), num_ipus=3).is_model
            True
        """
        if num_ipus > MAX_IPUS_PER_PROCESS:
            raise createPoptorchError(
                f"Too many IPUs requested ({num_ipus}). Experiments that need more "
                f"than {MAX_IPUS_PER_PROCESS} IPUs require distributed execution."
            )
        is_model = uses_ipu_model(options)
        is_offline = options.connection_type == ConnectionType.Never.value
        popart = options._Popart.options
        if is_model:
            _check_model(is_offline, popart.get("enableEngineCaching", False))
        elif is_offline and options.exists("ipu_id"):
            raise createPoptorchError(
                "An offline target (ConnectionType.Never) is no device, so it can't "
                f"be the one that Options.useIpuId({options.ipu_id}) asks for."
            )
        if popart["instrumentWithHardwareCycleCounter"] and (is_model or is_offline):
            raise createPoptorchError(
                "Cycle count logging is only supported on actual IPU hardware. It is "
                f"{'the IPU Model' if is_model else 'an offline target'} here: use "
                "Options.logCycleCount(False)."
            )
        if is_model:
            return cls(is_model, is_offline, num_ipus=0, first_ipu=None)
        if not is_offline:
            num_ipus = _reserved(num_ipus, rounds=options.auto_round_num_ipus)
        first_ipu = options.ipu_id if options.exists("ipu_id") else None
        return cls(is_model, is_offline, num_ipus, first_ipu)


def uses_ipu_model(options: Options) -> bool:
    """Whether a program with these options runs on the IPU Model.

    `Options.useIpuModel` decides if it was called, else the environment does.

    Example:
        >>> uses_ipu_model(Options().useIpuModel(True))
        True
    """
    if options.exists("use_model"):
        asked = bool(options.use_model)
        logger.info(
            "From the user configuration: Ipu model: %s",
            "Enabled" if asked else "Disabled",
        )
        return asked
    return ipu_model_is_on()


def ipu_model_is_on() -> bool:
    """Whether the environment asks for the IPU Model, the full or the small one.

    Example:
        >>> ipu_model_is_on()
        False
    """
    return any(is_on(variable) for variable in MODEL_VARIABLES)


def _check_model(is_offline: bool, is_cached: bool) -> None:
    version = os.environ.get(VERSION_VARIABLE, "ipu2")
    if version not in _MODEL_VERSIONS:
        raise createPoptorchError(
            f"{VERSION_VARIABLE}={version!r} is no version of an IPU. There are "
            f"{', '.join(_MODEL_VERSIONS)}."
        )
    if is_offline:
        raise createPoptorchError(
            "ConnectionType.Never is not supported for the IPU Model: there is no "
            "device to stay away from. Use Options.useIpuModel(False), or another "
            "connection type."
        )
    if is_cached:
        logger.warning("Executables of the IPU Model are not cached.")


def _reserved(num_ipus: int, *, rounds: bool) -> int:
    """Size of the smallest group with `num_ipus` IPUs: a power of two on hardware."""
    power = 1 << (num_ipus - 1).bit_length()
    if power == num_ipus:
        return num_ipus
    if not rounds:
        raise createPoptorchError(
            f"The model specifies the use of {num_ipus} IPUs, however PopTorch must "
            f"reserve a minimum of {power} in order to allow the model to run, because "
            "PopTorch must reserve a power of 2 or maximum of 64 IPUs per process. "
            "Please reconfigure your model to use a different number of IPUs or set "
            "poptorch.Options().autoRoundNumIPUs(True)."
        )
    logger.warning(
        "Reserving %d IPUs for a model that uses %d, because hardware has groups of "
        "powers of two only: %d are idle.",
        power,
        num_ipus,
        power - num_ipus,
    )
    return power
