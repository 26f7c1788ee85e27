# SPDX-License-Identifier: Apache-2.0
"""The environment variables by which PopRun informs an instance.

Their names are known from a published log of PopRun. The number of instances and the
index of this one follow from the replicas, if all instances have the same number.
"""

from __future__ import annotations

import os

_TOTAL_REPLICAS = "POPDIST_NUM_TOTAL_REPLICAS"
_LOCAL_REPLICAS = "POPDIST_NUM_LOCAL_REPLICAS"
_FIRST_REPLICA = "POPDIST_REPLICA_INDEX_OFFSET"
_IPUS_PER_REPLICA = "POPDIST_NUM_IPUS_PER_REPLICA"
_IS_UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"


def isPopdistEnvSet() -> bool:
    """Whether PopRun started this process.

    Example:
        >>> isPopdistEnvSet()
        False
    """
    return _TOTAL_REPLICAS in os.environ


def getNumTotalReplicas() -> int:
    """The number of replicas in all instances; 1 without PopRun.

    Example:
        >>> getNumTotalReplicas()
        1
    """
    return _read(_TOTAL_REPLICAS, 1)


def getNumLocalReplicas() -> int:
    """The number of replicas in this instance; 1 without PopRun.

    Example:
        >>> getNumLocalReplicas()
        1
    """
    return _read(_LOCAL_REPLICAS, 1)


def getNumIpusPerReplica() -> int:
    """The number of IPUs that one replica has; 1 without PopRun.

    Example:
        >>> getNumIpusPerReplica()
        1
    """
    return _read(_IPUS_PER_REPLICA, 1)


def getNumInstances() -> int:
    """The number of instances; 1 without PopRun.

    Raises:
        RuntimeError: If not all instances have the same number of replicas.

    Example:
        >>> getNumInstances()
        1
    """
    return getNumTotalReplicas() // _replicas_of_each()


def getInstanceIndex() -> int:
    """The index of this instance; 0 without PopRun.

    Raises:
        RuntimeError: If not all instances have the same number of replicas.

    Example:
        >>> getInstanceIndex()
        0
    """
    return _read(_FIRST_REPLICA, 0) // _replicas_of_each()


def _read(variable: str, default: int) -> int:
    return int(os.environ.get(variable, default))


def _replicas_of_each() -> int:
    total, local = getNumTotalReplicas(), getNumLocalReplicas()
    if os.environ.get(_IS_UNIFORM, "1") == "0" or local < 1 or total % local:
        raise RuntimeError(
            f"{_LOCAL_REPLICAS}={local} of {_TOTAL_REPLICAS}={total}: the emulator "
            "knows only instances with the same number of replicas each."
        )
    return local
