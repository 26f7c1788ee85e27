# SPDX-License-Identifier: Apache-2.0
"""PopDist on the host: the index of this instance of a distributed program.

PopRun sets environment variables in each instance, which are read here too; `python -m
ipufit.emulator` sets them in the processes of torchrun. Without them there is one
instance, with one replica. Their names are known from a published log of PopRun. The
number of instances and the index of this one follow from the replicas, if all instances
have the same number.

`popdist.popdist_core` and `popdist.poptorch` are other names of this module. What
`popdist.poptorch` does comes from PopTorch's own tests (`tests/popdist_test.py`).
"""

from __future__ import annotations

import os
import sys
from typing import Any, Callable, Collection, NoReturn

from . import options as poptorch_options
from ._processes import join_processes

__path__: list[str] = []
"""Makes the module a package for Python, which then asks `_install` for submodules."""

popdist_core = poptorch = sys.modules[__name__]

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


def _refused(method: str) -> Callable[..., NoReturn]:
    """Return a setter that refuses every call, because PopRun decides."""

    def refuse(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"Cannot call `{method}` with popdist.poptorch.Options: PopRun decides it. "
            "Remove the call, or use poptorch.Options where PopRun isn't in use."
        )

    return refuse


class _Distributed(poptorch_options._DistributedOptions):
    """`Options.Distributed`, set by PopRun."""

    disable = _refused("Distributed.disable")
    configureProcessId = _refused("Distributed.configureProcessId")
    setEnvVarNames = _refused("Distributed.setEnvVarNames")


class Options(poptorch_options.Options):
    """`poptorch.Options` with replicas and process index set by PopRun.

    Args:
        ipus_per_replica: Number of IPUs of one replica, by default from PopRun. It is
            stored only: the emulator counts IPUs from the model.

    Raises:
        RuntimeError: If not all instances have the same number of replicas.

    Example:
        >>> options = Options(ipus_per_replica=2)
        >>> options.Distributed.numProcesses
        1
        >>> options.replicationFactor(2)
        Traceback (most recent call last):
        RuntimeError: Cannot call `replicationFactor` with popdist.poptorch.Options...
    """

    _ipus_per_replica: int
    replicationFactor = _refused("replicationFactor")
    useIpuId = _refused("useIpuId")

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        if ipus_per_replica is None:
            ipus_per_replica = getNumIpusPerReplica()
        # Through __dict__: __setattr__ refuses names that don't exist yet.
        self.__dict__["_ipus_per_replica"] = ipus_per_replica
        self.set(replication_factor=getNumLocalReplicas())
        self.Distributed.configureProcessId(getInstanceIndex(), getNumInstances())
        self.Distributed.__class__ = _Distributed
