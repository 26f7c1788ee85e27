# SPDX-License-Identifier: Apache-2.0
"""PopDist on the host: the index of this instance of a distributed program.

PopRun passes it to each instance in environment variables, which are read here too.
Without them there is one instance, with one replica. Instances don't exchange
gradients: the emulator refuses to compile a training model for several.
"""

from __future__ import annotations

from typing import Any, Callable, Collection

from . import poptorch
from ._environment import (
    getInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
    getNumLocalReplicas,
    getNumTotalReplicas,
    isPopdistEnvSet,
)

__all__ = [
    "execute_on_instances",
    "getInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "init",
    "isPopdistEnvSet",
    "poptorch",
]


def init() -> None:
    """Do nothing: on the host no instance has to be prepared.

    Example:
        >>> init()
    """


def execute_on_instances(
    instances: Collection[int], function: Callable[..., Any], *args: Any
) -> Any:
    """Call a function on some of the instances.

    Args:
        instances: Indices of the instances.
        function: Function to call.
        args: Arguments of the function.

    Returns:
        The function's result; `None` on the other instances.

    Example:
        >>> execute_on_instances({0}, max, 2, 3)
        3
        >>> execute_on_instances({1}, max, 2, 3)
    """
    return function(*args) if getInstanceIndex() in instances else None
