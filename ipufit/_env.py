# SPDX-License-Identifier: Apache-2.0
"""The environment variables that ipufit reads.

| Variable | Values | Effect |
|---|---|---|
| `IPUFIT_BACKEND` | `auto`, `poptorch`, `emulator` | which PopTorch runs the models |
| `IPUFIT_REPLICAS` | a number | replicas of all processes, as `ipufit launch` sets it |
| `IPUFIT_PROCESS` | `1/4:0/1` | which process others load for, as ipufit sets it |
| `IPUFIT_PROCESS_TIMEOUT` | seconds, 600 | how long a process waits for others |
| `IPUFIT_COMPILE_FOR` | `1`, `2`, `21` | version of the IPUs of an offline config |
| `IPUFIT_TRACEBACK` | `full` | tracebacks show the frames of ipufit and torch, too |
| `POPTORCH_WAIT_FOR_IPU` | PopTorch's own | no attempt to hold two programs at once |

`ipufit.emulator` stands alone and reads its own (`IPUFIT_EMULATOR_IPUS`).
"""

from __future__ import annotations

import glob
import multiprocessing
import os
import re

from .errors import ConfigError

BACKENDS = ("auto", "poptorch", "emulator")
BACKEND = "IPUFIT_BACKEND"
REPLICAS = "IPUFIT_REPLICAS"
PROCESS = "IPUFIT_PROCESS"
PROCESS_TIMEOUT = "IPUFIT_PROCESS_TIMEOUT"
COMPILE_FOR = "IPUFIT_COMPILE_FOR"
IPU_VERSIONS = (1, 2, 21)


def backend() -> str:
    """Return the PopTorch that `IPUFIT_BACKEND` asks for.

    Returns:
        One of `BACKENDS`.

    Raises:
        ConfigError: `IPUFIT_BACKEND` has another value.

    Example:
        >>> backend() in BACKENDS
        True
    """
    value = os.environ.get(BACKEND, "auto") or "auto"
    if value not in BACKENDS:
        raise ConfigError(
            f"IPUFIT_BACKEND={value!r} is not a backend: set it to one of "
            f"{', '.join(BACKENDS)}, or unset it."
        )
    return value


_OF_HOSTS_WITH_IPUS = (
    "POPLAR_SDK_ENABLED",
    "IPUOF_VIPU_API_PARTITION_ID",
    "IPUOF_CONFIG_PATH",
)


def signs_of_ipus() -> list[str]:
    """List the signs that this host has IPUs: environment variables and devices.

    The SDK's `enable.sh`, a V-IPU partition and PopRun set the variables; cards are
    devices of the system.

    Example:
        >>> [sign for sign in signs_of_ipus() if sign.startswith("IPUFIT_")]
        []
    """
    variables = [name for name in _OF_HOSTS_WITH_IPUS if os.environ.get(name)]
    of_poprun = sorted(name for name in os.environ if name.startswith("POPDIST_"))
    return [*variables, *of_poprun[:1], *sorted(glob.glob("/dev/ipu*"))[:1]]


def is_first_process() -> bool:
    """Return whether this process prints messages that are the same in all processes.

    Example:
        >>> is_first_process()
        True
    """
    ranks = "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"
    is_first = all(os.environ.get(rank, "0") == "0" for rank in ranks)
    return is_first and multiprocessing.parent_process() is None


def poptorch_install_hint() -> str:
    """Return how to install PopTorch, with the wheel of the SDK if there is one.

    Example:
        >>> "3.8" in poptorch_install_hint()
        True
    """
    poplar = os.environ.get("POPLAR_SDK_ENABLED", "")
    folders = [poplar, os.path.dirname(poplar)] if poplar else []
    wheels = [w for f in folders for w in glob.glob(os.path.join(f, "poptorch-*.whl"))]
    wheel = sorted(wheels)[-1] if wheels else "the SDK's poptorch-*.whl"
    tag = re.search(r"-cp(\d)(\d+)-", wheel)
    version = ".".join(tag.groups()) if tag else "3.8"
    return (
        f"PopTorch is on no package index: its wheel in the Poplar SDK is for Python "
        f"{version}. Make a virtual environment of that Python, run `pip install "
        f"{wheel}` in it, and source the enable.sh of the SDK's poplar and popart "
        "folders"
    )


def waits_for_ipus() -> bool:
    """Return whether PopTorch waits for busy IPUs instead of raising.

    Example:
        >>> waits_for_ipus()
        False
    """
    return os.environ.get("POPTORCH_WAIT_FOR_IPU", "0") not in ("", "0")


def whole_number(text: str) -> int | None:
    """Return the whole number that a text of digits stands for; None for other texts.

    Example:
        >>> whole_number("16"), whole_number("-1"), whole_number("9" * 5000)
        (16, None, None)
    """
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def total_replicas() -> int | None:
    """Return the number of replicas that a launcher asked for; None without a launcher.

    Raises:
        ConfigError: `IPUFIT_REPLICAS` isn't a whole number of 1 or more.

    Example:
        >>> total_replicas() is None
        True
    """
    text = os.environ.get(REPLICAS, "")
    if not text:
        return None
    replicas = whole_number(text)
    if not replicas:
        raise ConfigError(f"{REPLICAS}={text!r} is not a whole number of 1 or more.")
    return replicas


def check_numbers() -> None:
    """Refuse non-numeric values of ipufit's numeric variables, even of unused ones.

    Raises:
        ConfigError: A variable has another value.

    Example:
        >>> check_numbers()
    """
    total_replicas()
    process_timeout()
    compile_for()


def process_of_parent() -> tuple[int, int, str] | None:
    """Return the process that this data worker loads samples for; None if unset.

    Returns:
        Index of the process, the number of processes, and the launcher's index and
        count as text.

    Raises:
        ConfigError: `IPUFIT_PROCESS` wasn't set by ipufit.

    Example:
        >>> process_of_parent() is None
        True
    """
    text = os.environ.get(PROCESS, "")
    if not text:
        return None
    process, _, launched = text.partition(":")
    index, _, count = process.partition("/")
    numbers = whole_number(index), whole_number(count)
    if numbers[0] is None or numbers[1] is None or numbers[0] >= numbers[1]:
        raise ConfigError(f"{PROCESS}={text!r} was not set by ipufit: unset it.")
    return numbers[0], numbers[1], launched


def process_timeout() -> float:
    """Return the seconds that a process waits for others before it gives up.

    Raises:
        ConfigError: `IPUFIT_PROCESS_TIMEOUT` isn't a positive number.

    Example:
        >>> process_timeout()
        600.0
    """
    text = os.environ.get(PROCESS_TIMEOUT, "") or "600"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ConfigError(
            f"{PROCESS_TIMEOUT}={text!r} isn't a positive number of seconds."
        )
    return seconds


def compile_for() -> int:
    """Return the version of the IPUs to compile for on a host without IPUs.

    Raises:
        ConfigError: `IPUFIT_COMPILE_FOR` has another value than `IPU_VERSIONS`.

    Example:
        >>> compile_for()
        2
    """
    text = os.environ.get(COMPILE_FOR, "") or "2"
    if text not in map(str, IPU_VERSIONS):
        raise ConfigError(
            f"{COMPILE_FOR}={text!r} isn't a version of IPUs: set it to one of "
            f"{', '.join(map(str, IPU_VERSIONS))}, or unset it."
        )
    return int(text)
