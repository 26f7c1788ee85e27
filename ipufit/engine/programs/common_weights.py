# SPDX-License-Identifier: Apache-2.0
"""The weights of a module in several processes: all begin with those of process 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Iterable

import torch

from ipufit.distributed import Processes
from ipufit.engine.weights.wrapping import weights_of


@dataclass
class CommonWeights:
    """Gives all processes the same weights, where they may have others.

    Args:
        module: The user's module.
        processes: The processes that run it together.
    """

    module: torch.nn.Module
    processes: Processes
    _are_common: bool = field(default=False, init=False)

    def begin_alike(
        self, fetch: Callable[[], None], more: Iterable[torch.nn.Module] = ()
    ) -> None:
        """Give all processes the weights of process 0, the first time.

        Afterwards their updates are the same, and only buffers differ.

        Args:
            fetch: Brings the newest weights into the module.
            more: Further modules, such as losses with weights.
        """
        if not self.processes.are_several or self._are_common:
            return
        fetch()
        modules = (self.module, *more)
        with torch.no_grad():
            self.processes.broadcast([w for m in modules for w in weights_of(m)])
        self._are_common = True

    @torch.no_grad()
    def share_buffers(self, fetch: Callable[[], None]) -> None:
        """Give all processes the buffers of process 0.

        Each replica has running statistics of its own, such as those of batch norm. The
        first replica's count, so that all processes evaluate and end alike.

        Args:
            fetch: Brings the newest weights into the module, if it has buffers.
        """
        buffers = self.module.buffers
        if self.processes.are_several and any(True for _ in buffers()):
            fetch()
            self.processes.broadcast(list(buffers()))
