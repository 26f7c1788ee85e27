# SPDX-License-Identifier: Apache-2.0
"""The weights of a module in several processes: all begin with those of process 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Iterable

import torch
from torch import Tensor

from ipufit.distributed import Processes
from ipufit.engine.weights.fingerprint import checksum
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
    _lent: list[tuple[Tensor, int, Tensor]] = field(default_factory=list, init=False)

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
        first replica's count, so that all processes evaluate and end alike. They train
        on with their own, which `take_back` has restored then: otherwise some devices
        would get weights anew, and others not.

        Args:
            fetch: Brings the newest weights into the module, if it has buffers.
        """
        buffers = self.module.buffers
        if self.processes.are_several and any(True for _ in buffers()):
            fetch()
            self.take_back()
            own = [buffer.detach().clone() for buffer in buffers()]
            self.processes.broadcast(list(buffers()))
            if not self.processes.is_first:
                given = map(checksum, buffers())
                self._lent = list(zip(buffers(), given, own))

    def take_back(self) -> None:
        """Restore the buffers of this process, but those that were changed since."""
        if not self._lent:
            return
        with torch.no_grad():
            for buffer, given, own in self._lent:
                if checksum(buffer) == given:
                    buffer.copy_(own)
        self._lent = []
