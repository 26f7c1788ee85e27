# SPDX-License-Identifier: Apache-2.0
"""The section `Options.Distributed`: one model run by several processes."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from ipufit.emulator._options.storage import OptionsDict

_DistributedT = TypeVar("_DistributedT", bound="_DistributedOptions")


class _DistributedOptions(OptionsDict):
    """`Options.Distributed`: which of how many processes this is.

    New options read Open MPI's variables, so they know under `mpirun`.
    """

    num_distributed_processes: int
    distributed_process_id: int
    ipuof_configs: dict[str, Any]

    def __init__(self) -> None:
        super().__init__(
            {
                "num_distributed_processes": 1,
                "distributed_process_id": 0,
                "ipuof_configs": {},
            }
        )
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
        """How many processes run together.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.configureProcessId(1, 2).numProcesses
            2
        """
        return self.num_distributed_processes

    def disable(self: _DistributedT) -> _DistributedT:
        """Go back to one process.

        Returns:
            The section.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.disable().numProcesses
            1
        """
        return self.configureProcessId(0, 1)

    def configureProcessId(
        self: _DistributedT, process_id: int, num_processes: int
    ) -> _DistributedT:
        """Say which process this is.

        Args:
            process_id: Its index; a wrong one isn't noticed here.
            num_processes: How many processes there are.

        Returns:
            The section.

        Raises:
            AssertionError: If one isn't an int.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.configureProcessId(3, 4).processId
            3
        """
        self.set(
            distributed_process_id=process_id, num_distributed_processes=num_processes
        )
        return self

    def setEnvVarNames(
        self: _DistributedT, var_num_processes: str, var_process_id: str
    ) -> _DistributedT:
        """Read which process this is from the environment.

        Args:
            var_num_processes: Variable with the number of processes; 1 if unset.
            var_process_id: Variable with this one's index; 0 if unset.

        Returns:
            The section.

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
