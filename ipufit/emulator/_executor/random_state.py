# SPDX-License-Identifier: Apache-2.0
"""The random state of an executor's device, as users read, keep and set it."""

from __future__ import annotations

from typing import Sequence

import torch

from ipufit.emulator._layout.device_rng import DeviceRng, check_rng_state
from ipufit.emulator._options.options import Options


class RandomState:
    """The random state of the device, and the one that the host saw last.

    Each attaching begins with the host's.

    Attributes:
        is_stale: Whether the device has run since the host saw its state.
    """

    def __init__(self, options: Options) -> None:
        self._device: DeviceRng | None = None
        self._host_state: list[int] | None = None
        self.is_stale = False
        distributed = options.Distributed
        self._process = distributed.processId if distributed.numProcesses > 1 else 0
        if options.exists("random_seed"):
            self._host_state = [options.random_seed]

    def read(self) -> list[int] | None:
        """Read the seed and the generator's state; None without a seed before a run."""
        if self.is_stale and self._device is not None:
            self._host_state = self._device.save()
            self.is_stale = False
        return self._host_state

    def set(self, state: Sequence[int] | None) -> None:
        """Replace the random state; a list of a seed alone begins at that seed.

        Raises:
            ValueError: `state` isn't a random state.
        """
        self._host_state = check_rng_state(state or [])
        self.is_stale = False
        if self._device is not None:
            self._device.restore(self._host_state)

    def start(self) -> DeviceRng:
        """Give a device that is being attached its random state."""
        self._device = DeviceRng(torch.initial_seed(), self._process)
        if self._host_state is not None:
            self._device.restore(self._host_state)
        return self._device

    def end(self) -> None:
        """Forget the device, and with it a state that wasn't read."""
        self._device = None
        self.is_stale = False
