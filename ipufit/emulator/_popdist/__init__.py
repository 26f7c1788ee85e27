# SPDX-License-Identifier: Apache-2.0
"""PopDist on the host: the index of this instance of a distributed program.

PopRun sets environment variables in each instance, which are read here too; `python -m
ipufit.emulator` sets them in the processes of torchrun. Without them there is one
instance, with one replica.
"""

from __future__ import annotations

from typing import Any, Callable, Collection

from .._processes import join_processes
from . import _environment as popdist_core
from . import poptorch
from ._environment import (
    getDeviceId,
    getInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
    getNumLocalReplicas,
    getNumTotalReplicas,
    getReplicaIndexOffset,
    isPopdistEnvSet,
)

__all__ = [
    "execute_on_instances",
    "getDeviceId",
    "getInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "init",
    "isPopdistEnvSet",
    "popdist_core",
    "poptorch",
]


def init() -> None:
    """Check PopRun's variables; instances connect when they first exchange data.

    Raises:
        RuntimeError: If not all instances have the same number of replicas.

    Example:
        >>> init()
    """
    getNumInstances()


def execute_on_instances(
    instances: Collection[int], function: Callable[..., Any], *args: Any
) -> Any:
    """Call a function on some instances, while the others wait.

    All instances make this call. If the function fails on one, the others fail too when
    that instance ends.

    Args:
        instances: Indices of the instances.
        function: Function to call.
        args: Arguments of the function.

    Returns:
        The function's result; `None` on the other instances.

    Raises:
        RuntimeError: If not all instances have the same number of replicas.
        Error: Another instance has ended, or didn't come in time.

    Example:
        >>> execute_on_instances({0}, max, 2, 3)
        3
        >>> execute_on_instances({1}, max, 2, 3)
    """
    index, count = getInstanceIndex(), getNumInstances()
    result = function(*args) if index in instances else None
    if count > 1:
        join_processes(index, count).wait()
    return result
