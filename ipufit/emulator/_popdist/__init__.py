# SPDX-License-Identifier: Apache-2.0
"""PopDist on the host: which instance of a distributed program this is.

PopRun tells its instances in environment variables, and these are read here too.
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
    """Get ready to work with the other instances: here, nothing to do.

    Example:
        >>> init()
    """


def execute_on_instances(
    instances: Collection[int], function: Callable[..., Any], *args: Any
) -> Any:
    """Call a function on some of the instances.

    Args:
        instances: Which ones, by index.
        function: What to call.
        args: Its arguments.

    Returns:
        What the function returns; `None` on the other instances.

    Example:
        >>> execute_on_instances({0}, max, 2, 3)
        3
        >>> execute_on_instances({1}, max, 2, 3)
    """
    return function(*args) if getInstanceIndex() in instances else None
