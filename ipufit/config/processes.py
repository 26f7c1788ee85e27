# SPDX-License-Identifier: Apache-2.0
"""Processes and replicas of a config: its fields, the launcher, the user's options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ipufit._poptorch import popdist, poptorch
from ipufit.distributed import ProcessInfo, get_process_info, has_group
from ipufit.errors import ConfigError


def process_for(
    process_id: int | None, num_processes: int | None, own: poptorch.Options | None
) -> ProcessInfo:
    """Find out which process this is.

    Args:
        process_id: The config's; it counts before everything else.
        num_processes: The config's.
        own: The user's options for training; they count if they name several
            processes, and else the launcher does.

    Raises:
        ConfigError: The launcher and the own options don't agree, or the launcher's
            variables are incomplete.

    Example:
        >>> process_for(1, 4, None)
        ProcessInfo(index=1, count=4, local_index=1, launcher='config', replicas=None)
    """
    if process_id is not None and num_processes is not None:
        return ProcessInfo(process_id, num_processes, process_id, "config")
    info = get_process_info()
    if own is None or own.Distributed.numProcesses == 1:
        return info
    given = own.Distributed.processId, own.Distributed.numProcesses
    if info.count > 1 and given != (info.index, info.count):
        raise ConfigError(
            f"training_options say that this is process {given[0]} of {given[1]}, and "
            f"{info.launcher} says that it is {info.index} of {info.count}. Leave "
            "Options.Distributed alone: ipufit sets it."
        )
    return replace(info, index=given[0], count=given[1])


def remembered_process(store: dict[str, Any], *given: Any) -> ProcessInfo:
    """Find out which process this is, once for each config.

    Looking at all launchers' variables takes as long as a small call. A process group
    that is made later counts.

    Args:
        store: Keeps the answer.
        given: Arguments of `process_for`.
    """
    known = store.get("_process")
    if known is None or known[1] != has_group():
        known = store["_process"] = process_for(*given), has_group()
    info: ProcessInfo = known[0]
    return info


def replicas_for(given: int | None, process: ProcessInfo) -> int:
    """Replicas of one process, by the config or else by the launcher.

    Args:
        given: Replicas in the config.
        process: Says what the launcher asks for.

    Raises:
        ConfigError: Both say something, and not the same.

    Example:
        >>> replicas_for(None, ProcessInfo(0, 4, replicas=2))
        2
    """
    if given is None:
        return process.replicas or 1
    if process.replicas not in (None, given):
        raise ConfigError(
            f"replicas={given}, and the launcher gives this process {process.replicas} "
            f"replicas ({process.total_replicas} in {process.count} processes). Leave "
            f"`replicas` open, or launch with {given * process.count} replicas in all."
        )
    return given


def new_options(process: ProcessInfo, replicas: int) -> poptorch.Options:
    """Make options with a number of replicas, for this process.

    Under PopRun they are PopDist's, which has set both, and refuses to be told.
    """
    if process.launcher == "poprun":
        options: poptorch.Options = popdist().poptorch.Options()
        return options
    options = poptorch.Options()
    options.replicationFactor(replicas)
    set_process(options, process)
    return options


def set_process(options: poptorch.Options, process: ProcessInfo) -> None:
    """Name this process in options that don't; PopDist's do, and refuse to be told."""
    given = options.Distributed
    if (given.processId, given.numProcesses) != (process.index, process.count):
        given.configureProcessId(process.index, process.count)
