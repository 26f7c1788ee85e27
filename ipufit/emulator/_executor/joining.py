# SPDX-License-Identifier: Apache-2.0
"""Join the processes that train a model, and begin alike in all of them."""

from __future__ import annotations

from ipufit.emulator._executor.executable import Executable
from ipufit.emulator._options.options import Options
from ipufit.emulator._processes import (
    Processes,
    broadcast_weights,
    check_agreement,
    join_processes,
)


class Joining:
    """Joins the processes that train a model each time that it is attached.

    Args:
        options: The options of the executor.
        is_training: Whether it trains: inference programs exchange nothing.
    """

    def __init__(self, options: Options, *, is_training: bool) -> None:
        self._options = options
        self._is_needed = is_training and options.Distributed.numProcesses > 1
        self._begun: Executable | None = None

    def join(self, executable: Executable) -> Processes | None:
        """Join the other processes; None if this one is alone.

        The first time after compiling, the program must be the same in all of them, and
        those but the first get the host weights of process 0.

        Raises:
            Error: Another process trains another program, has ended, or didn't come.
        """
        if not self._is_needed:
            return None
        distributed = self._options.Distributed
        processes = join_processes(distributed.processId, distributed.numProcesses)
        if executable is not self._begun:
            check_agreement(processes, self._facts(executable))
            broadcast_weights(processes, executable.host_weights)
            self._begun = executable
        return processes

    def _facts(self, executable: Executable) -> dict[str, object]:
        options, training = self._options, self._options.Training
        weights = [
            (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
            for name, tensor in executable.host_weights.items()
        ]
        reduction = (
            training.accumulation_and_replication_reduction_type,
            training.meanAccumulationAndReplicationReductionStrategy,
        )
        return {
            "the number of device iterations": options.device_iterations,
            "the gradient accumulation": training.gradient_accumulation,
            "the number of replicas": options.replication_factor,
            "the reduction of gradients": reduction,
            "the weights": weights,
        }
