# SPDX-License-Identifier: Apache-2.0
"""`popdist.poptorch`: options whose replicas and process index PopRun sets.

The contract comes from PopTorch's own tests (`tests/popdist_test.py`).
"""

from __future__ import annotations

from typing import Any, Callable, NoReturn

from ..options import Options as _PoptorchOptions
from ..options import _DistributedOptions
from ._environment import (
    getInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
    getNumLocalReplicas,
)

__all__ = ["Options"]


def _refused(method: str) -> Callable[..., NoReturn]:
    """Return a setter that refuses every call, because PopRun decides."""

    def refuse(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"Cannot call `{method}` with popdist.poptorch.Options: PopRun decides it. "
            "Remove the call, or use poptorch.Options where PopRun isn't in use."
        )

    return refuse


class _Distributed(_DistributedOptions):
    """`Options.Distributed`, set by PopRun."""

    disable = _refused("Distributed.disable")
    configureProcessId = _refused("Distributed.configureProcessId")
    setEnvVarNames = _refused("Distributed.setEnvVarNames")


class Options(_PoptorchOptions):
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
