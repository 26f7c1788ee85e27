# SPDX-License-Identifier: Apache-2.0
"""The environment variables by which PopRun informs an instance.

Their names are known from a published log of PopRun. The number of instances and the
index of this one follow from the replicas, if all instances have the same number.
"""

from __future__ import annotations

import os

TOTAL_REPLICAS = "POPDIST_NUM_TOTAL_REPLICAS"
LOCAL_REPLICAS = "POPDIST_NUM_LOCAL_REPLICAS"
FIRST_REPLICA = "POPDIST_REPLICA_INDEX_OFFSET"
IPUS_PER_REPLICA = "POPDIST_NUM_IPUS_PER_REPLICA"
IS_UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
LOCAL_INSTANCE = "POPDIST_LOCAL_INSTANCE_INDEX"


def isPopdistEnvSet() -> bool:
    """Whether PopRun started this process.

    Example:
        >>> isPopdistEnvSet()
        False
    """
    return TOTAL_REPLICAS in os.environ


def getNumTotalReplicas() -> int:
    """The number of replicas in all instances; 1 without PopRun.

    Example:
        >>> getNumTotalReplicas()
        1
    """
    return _read(TOTAL_REPLICAS, 1)


def getNumLocalReplicas() -> int:
    """The number of replicas in this instance; 1 without PopRun.

    Example:
        >>> getNumLocalReplicas()
        1
    """
    return _read(LOCAL_REPLICAS, 1)


def getNumIpusPerReplica() -> int:
    """The number of IPUs that one replica has; 1 without PopRun.

    Example:
        >>> getNumIpusPerReplica()
        1
    """
    return _read(IPUS_PER_REPLICA, 1)


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
    return _read(FIRST_REPLICA, 0) // _replicas_of_each()


def getReplicaIndexOffset() -> int:
    """The index of this instance's first replica among all; 0 without PopRun.

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
