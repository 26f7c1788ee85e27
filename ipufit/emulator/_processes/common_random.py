# SPDX-License-Identifier: Apache-2.0
"""Random numbers that all processes draw alike, for what must be the same in all."""

from __future__ import annotations

import torch
from torch import Tensor

from ipufit.emulator._processes.processes import Processes


class CommonRandom:
    """A context in which all processes draw the same numbers from torch's generator.

    The seed is one that process 0 draws, so its own random state decides it. Afterwards
    each process goes on with its own numbers.

    Args:
        processes: The processes of this run.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._own_state: Tensor | None = None

    def __enter__(self) -> None:
        seed = torch.randint(2**62, ())
        self._processes.broadcast(seed)
        self._own_state = torch.random.get_rng_state()
        torch.default_generator.manual_seed(int(seed))

    def __exit__(self, *exception: object) -> None:
        if self._own_state is not None:
            torch.random.set_rng_state(self._own_state)
