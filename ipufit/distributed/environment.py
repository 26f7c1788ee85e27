# SPDX-License-Identifier: Apache-2.0
"""Read the index of this process, and their number, from a launcher's variables.

| Launcher | Variables |
|---|---|
| PopRun | `POPDIST_NUM_TOTAL_REPLICAS`, `POPDIST_NUM_LOCAL_REPLICAS`, ... |
| torchrun | `RANK`, `WORLD_SIZE`, `LOCAL_RANK` |
| Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK` |
| SLURM's srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID` |

The first launcher of the table with a variable that is set counts: PopRun starts
processes with Open MPI, and torchrun often runs inside of SLURM.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Mapping

from ipufit import _env
from ipufit.errors import ConfigError


@dataclass(frozen=True)
class ProcessInfo:
    """The index of a process in a run, and the number of processes.

    Attributes:
        index: Index of this process, from 0.
        count: Number of processes.
        local_index: Index of this process among those on its host.
        launcher: `"poprun"`, `"torchrun"`, `"mpirun"`, `"srun"`; `"group"` for a
            process group that the script made, `"config"` for `IPUConfig(process_id=)`;
            `""` for a process that was started by itself.
        replicas: Number of replicas of this process; None if the config decides.

    Example:
        >>> ProcessInfo(index=1, count=4, replicas=2).total_replicas
        8
    """

    index: int = 0
    count: int = 1
    local_index: int = 0
    launcher: str = ""
    replicas: int | None = None

    @property
    def total_replicas(self) -> int | None:
        """Number of replicas in all processes; None if the config decides."""
        return None if self.replicas is None else self.replicas * self.count

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which prints and writes files for all."""
        return self.index == 0


ALONE = ProcessInfo()
"""A process without others."""


@dataclass(frozen=True)
class _Launcher:
    """The variables of a launcher; index and count must be set together."""

    name: str
    index: str
    count: str
    local_index: str

    def read(self, environment: Mapping[str, str]) -> ProcessInfo | None:
        """Read the process; None if no variable is set.

        Raises:
            ConfigError: A variable is missing, or no number in range.
        """
        if not _require_all((self.index, self.count), environment, self.name):
            return None
        count = _number(self.count, environment, least=1)
        index = _number(self.index, environment, below=count, limit=self.count)
        local = index
        if self.local_index in environment:
            local = _number(self.local_index, environment)
        return ProcessInfo(index, count, local, self.name, _replicas_of_each(count))


_TOTAL = "POPDIST_NUM_TOTAL_REPLICAS"
_LOCAL = "POPDIST_NUM_LOCAL_REPLICAS"
_OFFSET = "POPDIST_REPLICA_INDEX_OFFSET"
_UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
_LOCAL_INSTANCE = "POPDIST_LOCAL_INSTANCE_INDEX"

_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    _Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
)


def process_of(environment: Mapping[str, str] = os.environ) -> ProcessInfo:
    """Read the index of this process from its launcher's variables.

    Args:
        environment: Variables by name.

    Raises:
        ConfigError: Some of a launcher's variables are missing, or their values don't
            fit together.

    Example:
        >>> process_of({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
        ProcessInfo(index=1, count=4, local_index=1, launcher='torchrun', replicas=None)
        >>> process_of({"RANK": "1"})
        Traceback (most recent call last):
        ipufit.errors.ConfigError: torchrun's variable RANK is set, and WORLD_SIZE is...
    """
    found = _of_poprun(environment)
    for launcher in _LAUNCHERS:
        found = found or launcher.read(environment)
    return found or _of_slurm(environment) or ALONE


def _of_poprun(environment: Mapping[str, str]) -> ProcessInfo | None:
    if not _require_all((_TOTAL, _LOCAL, _OFFSET), environment, "PopRun"):
        return None
    total = _number(_TOTAL, environment, least=1)
    local = _number(_LOCAL, environment, least=1)
    offset = _number(_OFFSET, environment, below=total, limit=_TOTAL)
    is_uniform = environment.get(_UNIFORM, "1") != "0"
    if total % local or offset % local or not is_uniform:
        raise ConfigError(
            f"PopRun gives this process {local} of {total} replicas, from number "
            f"{offset} on, so that not all processes have the same number. Choose "
            "--num-replicas as a multiple of --num-instances."
        )
    index = offset // local
    here = index
    if _LOCAL_INSTANCE in environment:
        here = _number(_LOCAL_INSTANCE, environment)
    return ProcessInfo(index, total // local, here, "poprun", local)


def _of_slurm(environment: Mapping[str, str]) -> ProcessInfo | None:
    """Return the task that `srun` started; None if this process is none.

    A batch script has `SLURM_PROCID=0` too, though it is no task of a step: only
    `SLURM_STEP_NUM_TASKS` shows that srun has started this process.
    """
    if "SLURM_STEP_NUM_TASKS" not in environment:
        return None
    names = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
    return _Launcher("srun", *names).read(environment)


def _require_all(
    names: tuple[str, ...], environment: Mapping[str, str], launcher: str
) -> bool:
    """Return whether all variables are set; False if none is.

    Raises:
        ConfigError: Only some of them are set.
    """
    there = [name for name in names if name in environment]
    missing = [name for name in names if name not in environment]
    if there and missing:
        raise ConfigError(
            f"{launcher}'s variable {', '.join(there)} is set, and "
            f"{', '.join(missing)} is missing: start all processes with a launcher "
            f"(`ipufit launch`), or unset {', '.join(there)}."
        )
    return bool(there)


def _number(
    name: str,
    environment: Mapping[str, str],
    *,
    least: int = 0,
    below: int | None = None,
    limit: str = "",
) -> int:
    text = environment[name]
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a whole number.") from None
    if value < least:
        raise ConfigError(f"{name}={value} is less than {least}.")
    if below is not None and value >= below:
        raise ConfigError(
            f"{name}={value} doesn't fit {limit}={below}: it counts from 0, so that "
            f"{below - 1} is the last."
        )
    return value


def _replicas_of_each(count: int) -> int | None:
    """Return the replicas of one process, from the total of `ipufit launch`.

    Raises:
        ConfigError: The processes can't share them equally.
    """
    total = _env.total_replicas()
    if total is None:
        return None
    if total % count:
        raise ConfigError(
            f"{_env.REPLICAS}={total} replicas can't be shared equally by {count} "
            f"processes. Use a multiple of {count}."
        )
    return total // count
