# SPDX-License-Identifier: Apache-2.0
"""The process that asks: by a config, the launcher, or the script's process group."""

from __future__ import annotations

from torch import distributed

from .collectives import Processes
from .environment import ProcessInfo, process_of
from .group import has_group

_configured: ProcessInfo | None = None
_times_asked = 0


def configure(info: ProcessInfo | None) -> None:
    """Have a process be the one that a config names, whatever its launcher says.

    Args:
        info: The process; None to go by the launcher again.
    """
    global _configured
    _configured = info


def get_process_info() -> ProcessInfo:
    """Which process this is, and how many there are.

    A dataset that divides its samples asks it in `__iter__`, as it asks
    `torch.utils.data.get_worker_info()` for the worker. The number comes from
    `IPUConfig(process_id=, num_processes=)`, else from PopRun's variables, a process
    group of torch.distributed, or the variables of torchrun, Open MPI or SLURM.

    Returns:
        The process; `ProcessInfo(index=0, count=1)` for one without others.

    Raises:
        ConfigError: Some of a launcher's variables are missing, or don't fit together.

    Example:
        >>> info = get_process_info()
        >>> samples = range(10)
        >>> list(samples)[info.index :: info.count] == list(samples)
        True
    """
    global _times_asked
    _times_asked += 1
    if _configured is not None:
        return _configured
    info = process_of()
    if has_group() and not info.launcher:
        size = distributed.get_world_size()
        return ProcessInfo(distributed.get_rank(), size, launcher="group")
    return info


def times_asked() -> int:
    """How many times `get_process_info` was called: a dataset may have done so."""
    return _times_asked


def processes() -> Processes:
    """The processes of the run, for exchanges between them."""
    return Processes(get_process_info())
