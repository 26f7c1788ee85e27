# SPDX-License-Identifier: Apache-2.0
"""PopRun's environment variables, read and written.

Their names are known from a published log of PopRun. The number of instances and the
index of this one follow from the replicas, if all instances have the same number.
"""

from __future__ import annotations

import os
import sys
import uuid
from typing import Mapping, Sequence

from .._switches import REPLICAS_VARIABLE, whole_number
from ..errors import createPoptorchError

TOTAL_REPLICAS = "POPDIST_NUM_TOTAL_REPLICAS"
LOCAL_REPLICAS = "POPDIST_NUM_LOCAL_REPLICAS"
FIRST_REPLICA = "POPDIST_REPLICA_INDEX_OFFSET"
IPUS_PER_REPLICA = "POPDIST_NUM_IPUS_PER_REPLICA"
IS_UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
LOCAL_INSTANCE = "POPDIST_LOCAL_INSTANCE_INDEX"


def isPopdistEnvSet() -> bool:
    """Return whether PopRun started this process.

    Example:
        >>> isPopdistEnvSet()
        False
    """
    return TOTAL_REPLICAS in os.environ


def getNumTotalReplicas() -> int:
    """Return the number of replicas in all instances; 1 without PopRun.

    Example:
        >>> getNumTotalReplicas()
        1
    """
    return _read(TOTAL_REPLICAS, 1)


def getNumLocalReplicas() -> int:
    """Return the number of replicas in this instance; 1 without PopRun.

    Example:
        >>> getNumLocalReplicas()
        1
    """
    return _read(LOCAL_REPLICAS, 1)


def getNumIpusPerReplica() -> int:
    """Return the number of IPUs of one replica; 1 without PopRun.

    Example:
        >>> getNumIpusPerReplica()
        1
    """
    return _read(IPUS_PER_REPLICA, 1)


def getNumInstances() -> int:
    """Return the number of instances; 1 without PopRun.

    Raises:
        RuntimeError: If not all instances have the same number of replicas.

    Example:
        >>> getNumInstances()
        1
    """
    return getNumTotalReplicas() // _replicas_of_each()


def getInstanceIndex() -> int:
    """Return the index of this instance; 0 without PopRun.

    Raises:
        RuntimeError: If not all instances have the same number of replicas.

    Example:
        >>> getInstanceIndex()
        0
    """
    return _read(FIRST_REPLICA, 0) // _replicas_of_each()


def getDeviceId(numIpus: int | None = None) -> int:
    """Return the ID of the device of this instance; 0 without PopRun.

    The instances of a host have its devices, in their order.

    Args:
        numIpus: The number of IPUs of one replica; the ID doesn't depend on it here.

    Example:
        >>> getDeviceId()
        0
    """
    return _read(LOCAL_INSTANCE, getInstanceIndex())


def getReplicaIndexOffset() -> int:
    """Return the index of this instance's first replica; 0 without PopRun.

    Example:
        >>> getReplicaIndexOffset()
        0
    """
    return _read(FIRST_REPLICA, 0)


def _read(variable: str, default: int) -> int:
    return int(os.environ.get(variable, default))


def _replicas_of_each() -> int:
    total, local = getNumTotalReplicas(), getNumLocalReplicas()
    if os.environ.get(IS_UNIFORM, "1") == "0" or local < 1 or total % local:
        raise RuntimeError(
            f"{LOCAL_REPLICAS}={local} of {TOTAL_REPLICAS}={total}: the emulator "
            "knows only instances with the same number of replicas each."
        )
    return local


# Instances started by torchrun ---------------------------------------------------


def torchrun_command(processes: int, arguments: Sequence[str]) -> list[str]:
    """Return a torchrun command that starts emulator processes on this host.

    Args:
        processes: The number of processes.
        arguments: The arguments of `python -m ipufit.emulator` in each of them.

    Example:
        >>> torchrun_command(2, ["train.py"])[-3:]
        ['-m', 'ipufit.emulator', 'train.py']
    """
    silent = ",".join(f"{index}:1" for index in range(1, processes))
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        # Not --standalone: up to torch 2.0 that takes one port of all, so that two
        # runs on one machine would meet.
        *("--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        *("--rdzv-id", uuid.uuid4().hex, "--nproc-per-node", str(processes)),
        *("--monitor-interval", "0.1"),
        *(("--redirects", silent) if silent else ()),
        *("-m", "ipufit.emulator", *arguments),
    ]


def launch_environment(
    processes: int, replicas: int | None, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment for `torchrun_command`.

    Args:
        processes: The number of processes.
        replicas: The number of replicas in all of them; None for one in each.
        environment: The environment of this process.

    Raises:
        Error: The replicas can't be shared evenly, or PopRun's variables are set.

    Example:
        >>> launch_environment(2, 4, {})["IPUFIT_REPLICAS"]
        '4'
    """
    if TOTAL_REPLICAS in environment:
        raise createPoptorchError(
            f"{TOTAL_REPLICAS} is set, as if PopRun had started this process "
            "already: unset it, or leave --processes out."
        )
    total = processes if replicas is None else replicas
    _local_replicas(total, processes)
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    return {
        "OMP_NUM_THREADS": threads,  # torchrun would warn, and take one
        **environment,
        REPLICAS_VARIABLE: str(total),
    }


def instance_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that PopRun would set in a process of torchrun's.

    PopRun starts instances by Open MPI's `mpirun`, so Open MPI's variables are
    included: `poptorch.Options` reads them.

    Args:
        environment: The environment of this process.

    Returns:
        Nothing if torchrun started one process alone and `IPUFIT_REPLICAS` isn't set,
        or if PopRun's variables are there already.

    Raises:
        Error: A variable is missing or no number, or the replicas can't be shared
            evenly.

    Example:
        >>> of_torchrun = {"RANK": "1", "WORLD_SIZE": "2", "IPUFIT_REPLICAS": "8"}
        >>> instance_variables(of_torchrun)["POPDIST_REPLICA_INDEX_OFFSET"]
        '4'
    """
    if TOTAL_REPLICAS in environment:
        return {}
    given = [name for name in ("RANK", "WORLD_SIZE") if environment.get(name)]
    if len(given) == 1:
        (missing,) = {"RANK", "WORLD_SIZE"} - set(given)
        raise createPoptorchError(
            f"{given[0]} is set but {missing} is not: torchrun sets both. Set "
            f"{missing} too, or unset {given[0]}."
        )
    index, count = (_number(environment, name) for name in given) if given else (0, 1)
    if not environment.get(REPLICAS_VARIABLE) and count == 1:
        return {}
    total = count
    if environment.get(REPLICAS_VARIABLE):
        total = _number(environment, REPLICAS_VARIABLE)
    local = _local_replicas(total, count)
    variables = {
        TOTAL_REPLICAS: total,
        LOCAL_REPLICAS: local,
        FIRST_REPLICA: index * local,
        IS_UNIFORM: 1,
        IPUS_PER_REPLICA: environment.get(IPUS_PER_REPLICA, 1),
        "OMPI_COMM_WORLD_RANK": index,
        "OMPI_COMM_WORLD_SIZE": count,
    }
    if environment.get("LOCAL_RANK") and environment.get("LOCAL_WORLD_SIZE"):
        local_index = _number(environment, "LOCAL_RANK")
        variables[LOCAL_INSTANCE] = local_index
        variables["OMPI_COMM_WORLD_LOCAL_RANK"] = local_index
        variables["OMPI_COMM_WORLD_LOCAL_SIZE"] = _number(
            environment, "LOCAL_WORLD_SIZE"
        )
    return {name: str(value) for name, value in variables.items()}


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    number = whole_number(text.strip())
    if number is None:
        raise createPoptorchError(f"{name}={text!r} is no whole number of 0 or more.")
    return number


def _local_replicas(total: int, processes: int) -> int:
    if total < 1 or total % processes:
        raise createPoptorchError(
            f"{total} replicas (--replicas, or {REPLICAS_VARIABLE}: those of all "
            f"processes) can't be shared by {processes} processes evenly: choose a "
            f"multiple of {processes}."
        )
    return total // processes
