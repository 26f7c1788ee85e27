# SPDX-License-Identifier: Apache-2.0
"""`popdist.poptorch`: options that PopRun has decided in part.

The contract is what PopTorch's own tests ask of it (`tests/popdist_test.py`).
"""

from __future__ import annotations

from typing import Any, NoReturn

from ipufit.emulator._options.distributed import _DistributedOptions
from ipufit.emulator._options.options import Options as _PoptorchOptions

from ._environment import (
    getInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
    getNumLocalReplicas,
)

__all__ = ["Options"]


def _refuse(method: str) -> NoReturn:
    raise RuntimeError(
        f"Cannot call `{method}` with popdist.poptorch.Options: PopRun decides it. "
        "Remove the call, or use poptorch.Options where PopRun isn't in use."
    )


class _Distributed(_DistributedOptions):
    """`Options.Distributed`, decided by PopRun."""

    def disable(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse("Distributed.disable")

    def configureProcessId(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse("Distributed.configureProcessId")

    def setEnvVarNames(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse("Distributed.setEnvVarNames")


class Options(_PoptorchOptions):
    """`poptorch.Options` with the replicas and the process that PopRun says.

    Args:
        ipus_per_replica: How many IPUs one replica has; by default, what PopRun
            says. Emulated IPUs are counted from the model, so it is kept only.

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

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        if ipus_per_replica is None:
            ipus_per_replica = getNumIpusPerReplica()
        # Through __dict__: __setattr__ refuses names that don't exist yet.
        self.__dict__["_ipus_per_replica"] = ipus_per_replica
        self.set(replication_factor=getNumLocalReplicas())
        self.Distributed.configureProcessId(getInstanceIndex(), getNumInstances())
        self.Distributed.__class__ = _Distributed

    def replicationFactor(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: PopRun has decided.

        Example:
            >>> Options().replication_factor
            1
        """
        _refuse("replicationFactor")

    def useIpuId(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: PopRun has decided.

        Example:
            >>> Options().exists("ipu_id")
            False
        """
        _refuse("useIpuId")
