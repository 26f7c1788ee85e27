# SPDX-License-Identifier: Apache-2.0
"""The section `Options.Distributed`: one model run by several processes."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from ipufit.emulator._options.storage import OptionsDict

_DistributedT = TypeVar("_DistributedT", bound="_DistributedOptions")


class _DistributedOptions(OptionsDict):
    """`Options.Distributed`: the index of this process, and how many there are.

    New options read both from the variables that `mpirun` of Open MPI sets.
    """

    def __init__(self) -> None:
        self.num_distributed_processes = 1
        self.distributed_process_id = 0
        self.ipuof_configs: dict[str, Any] = {}
        super().__init__()
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    @property
    def processId(self) -> int:
        """The index of this process.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.configureProcessId(1, 2).processId
            1
        """
        return self.distributed_process_id

    @property
    def numProcesses(self) -> int:
        """The number of processes that run together.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.configureProcessId(1, 2).numProcesses
            2
        """
        return self.num_distributed_processes

    def disable(self: _DistributedT) -> _DistributedT:
        """Set the number of processes to one.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.disable().numProcesses
            1
        """
        return self.configureProcessId(0, 1)

    def configureProcessId(
        self: _DistributedT, process_id: int, num_processes: int
    ) -> _DistributedT:
        """Set the index of this process and the number of processes.

        Any two integers are stored, whether they fit or not.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.configureProcessId(3, 4).processId
            3
        """
        return self._store(
            distributed_process_id=process_id, num_distributed_processes=num_processes
        )

    def setEnvVarNames(
        self: _DistributedT, var_num_processes: str, var_process_id: str
    ) -> _DistributedT:
        """Read the number of processes and this one's index from the environment.

        Args:
            var_num_processes: Variable for the number of processes; 1 if unset.
            var_process_id: Variable for the index; 0 if unset.

        Raises:
            ValueError: If a variable doesn't hold an integer.

        Example:
            >>> import os
            >>> from ipufit.emulator import Options
            >>> os.environ.update(MY_SIZE="2", MY_RANK="1")
            >>> Options().Distributed.setEnvVarNames("MY_SIZE", "MY_RANK").processId
            1
            >>> del os.environ["MY_SIZE"], os.environ["MY_RANK"]
        """
        return self.configureProcessId(
            process_id=int(os.environ.get(var_process_id, "0")),
            num_processes=int(os.environ.get(var_num_processes, "1")),
        )
