# SPDX-License-Identifier: Apache-2.0
"""The process group for exchanges: torch.distributed's, with gloo.

A group that the script has made is used, and never ended. Otherwise one is made at the
first exchange. It needs the address of process 0, which PopRun, Open MPI and SLURM
don't always give: `address` says when `MASTER_ADDR` and `MASTER_PORT` must be set.
"""

from __future__ import annotations

import atexit
import os
import re
from datetime import timedelta
from typing import Any, Mapping

from torch import distributed
from torch.distributed import (  # type: ignore[attr-defined,unused-ignore]
    PrefixStore,
    TCPStore,
)

from ipufit import _env
from ipufit.errors import ConfigError, ProcessError

from .environment import ProcessInfo

_DEFAULT_PORT = 29500  # torch's own
_gloo_beside: dict[
    int, Any
] = {}  # id of a default group -> gloo group of its processes


def has_group() -> bool:
    """Return whether there is a default process group."""
    return distributed.is_available() and distributed.is_initialized()


def group_of(info: ProcessInfo) -> Any:
    """Return the gloo group of all processes; it is made if there is none.

    Args:
        info: This process.

    Raises:
        ConfigError: The script's own group is of other processes, or nothing says
            where process 0 can be reached.
        ProcessError: The others can't be reached.
    """
    if not has_group():
        try:
            _make(info)
        except (RuntimeError, OSError) as error:
            raise ProcessError(
                f"Process {info.index} of {info.count} couldn't reach the others. If "
                "one of them has failed, its own error is the first of the output; "
                f"{_env.PROCESS_TIMEOUT} sets how many seconds they wait. ({error})"
            ) from error
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if (rank, size) != (info.index, info.count):
        raise ConfigError(
            f"torch.distributed's process group says that this is process {rank} of "
            f"{size}, and {info.launcher} says that it is {info.index} of "
            f"{info.count}. Make the group with all processes, or leave that to ipufit."
        )
    whole = distributed.group.WORLD
    if distributed.get_backend() == "gloo":
        return whole
    if id(whole) not in _gloo_beside:
        new_group: Any = distributed.new_group
        timeout = timedelta(seconds=_env.process_timeout())
        _gloo_beside[id(whole)] = new_group(backend="gloo", timeout=timeout)
    return _gloo_beside[id(whole)]


def _make(info: ProcessInfo) -> None:
    timeout = timedelta(seconds=_env.process_timeout())
    host, port = address(info, os.environ)
    # torchrun's agent may hold the store, whatever else has set variables.
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = info.index == 0 and not has_agent
    # Process 0 waits for others when the group is made, and not here, too.
    store: Any = TCPStore(
        host, port, info.count, is_master, timeout, wait_for_workers=False
    )
    if has_agent:
        # torchrun keeps its store when it starts processes again, and newer torch reads
        # addresses of processes that are gone from it.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"ipufit/{attempt}", store)
    distributed.init_process_group(
        "gloo",
        store=store,
        rank=info.index,
        world_size=info.count,
        timeout=timeout,
    )
    atexit.register(_end)


def _end() -> None:
    """End the group that was made here: gloo's threads must not outlive Python."""
    if has_group():
        distributed.destroy_process_group()


def address(info: ProcessInfo, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the host of process 0, and its port.

    `MASTER_ADDR` and `MASTER_PORT` are used if set. Otherwise the host is this one if
    Open MPI says that all processes are here, or the first host of SLURM's step. The
    port is torch's 29500, or derived from the number of SLURM's job.

    Args:
        info: This process.
        environment: Variables by name.

    Raises:
        ConfigError: No variable has the address.

    Example:
        >>> address(ProcessInfo(0, 2, launcher="mpirun"), {"MASTER_ADDR": "pod1"})
        ('pod1', 29500)
    """
    host = environment.get("MASTER_ADDR") or _host(info, environment)
    port = environment.get("MASTER_PORT") or _port(info, environment)
    if host is None or port is None:
        missing = " and ".join(
            name
            for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port))
            if value is None
        )
        raise ConfigError(
            f"{info.count} processes are to exchange values, and nothing says where "
            f"process 0 can be reached: set {missing} in each of them, to the host of "
            "process 0 and a free port there; or start them with `ipufit launch` or "
            "torchrun, which do so."
        )
    if not str(port).isdigit():
        raise ConfigError(f"MASTER_PORT={port!r} is no number of a port.")
    return host, int(port)


def _host(info: ProcessInfo, environment: Mapping[str, str]) -> str | None:
    if info.launcher in ("poprun", "mpirun"):
        num_here = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE")
        return "127.0.0.1" if num_here == str(info.count) else None
    if info.launcher == "srun":
        nodes = environment.get("SLURM_STEP_NODELIST", "")
        # node[03-05,9],other: the first is node03.
        found = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
        return None if found is None else found[1] + (found[2] or "")
    return None


def _port(info: ProcessInfo, environment: Mapping[str, str]) -> int | None:
    if info.launcher == "srun":
        job = environment.get("SLURM_JOB_ID", "")
        return 15000 + int(job) % 10000 if job.isdigit() else None
    return _DEFAULT_PORT if info.launcher in ("poprun", "mpirun") else None
