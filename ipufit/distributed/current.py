# SPDX-License-Identifier: Apache-2.0
"""The present process: from a config, the launcher, or the script's process group."""

from __future__ import annotations

import multiprocessing
import os

from torch import distributed

from ipufit import _env
from ipufit.errors import ConfigError

from .collectives import Processes
from .environment import ProcessInfo, process_of
from .group import has_group

_configured: ProcessInfo | None = None


def configure(info: ProcessInfo | None) -> None:
    """Set the index of this process, in place of the launcher's.

    Args:
        info: The process; None to use the launcher's again.
    """
    global _configured
    _configured = info
    _tell_children(info)


def _tell_children(info: ProcessInfo | None) -> None:
    """Set the variable that tells spawned data workers the index of this process."""
    if info is None:
        os.environ.pop(_env.PROCESS, None)
    else:
        os.environ[_env.PROCESS] = f"{info.index}/{info.count}:{_launched()}"


def _launched() -> str:
    """Return index and count from a launcher's variables; `?` if they contradict."""
    try:
        info = process_of()
    except ConfigError:
        return "?"
    return f"{info.index}/{info.count}"


def _of_parent() -> ProcessInfo | None:
    """Return the process that this data worker loads for; None if it isn't a worker."""
    if multiprocessing.parent_process() is None or has_group():
        return None
    told = _env.process_of_parent()
    if told is None or told[2] != _launched():
        return None
    return ProcessInfo(told[0], told[1], told[0], "config")


def get_process_info() -> ProcessInfo:
    """Return the index of this process, and the number of processes.

    Call it in the `__iter__` of a dataset that divides its samples, as
    `torch.utils.data.get_worker_info()` for the worker. The index comes from
    `IPUConfig(process_id=, num_processes=)`, else from PopRun's variables, a process
    group of torch.distributed, or the variables of torchrun, Open MPI or SLURM.

    Returns:
        The process; `ProcessInfo(index=0, count=1)` for a single process.

    Raises:
        ConfigError: Some of a launcher's variables are missing, or don't fit together.

    Example:
        >>> info = get_process_info()
        >>> samples = range(10)
        >>> list(samples)[info.index :: info.count] == list(samples)
        True
    """
    if _configured is not None:
        return _configured
    parent = _of_parent()
    if parent is not None:
        return parent
    info = process_of()
    if has_group() and not info.launcher:
        size = distributed.get_world_size()
        info = ProcessInfo(distributed.get_rank(), size, launcher="group")
        _tell_children(info)
    elif multiprocessing.parent_process() is None:
        _tell_children(None)  # what another script or an ended group has left
    return info


def processes() -> Processes:
    """Return the processes of the run, for exchanges between them."""
    return Processes(get_process_info())
