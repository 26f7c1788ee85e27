# SPDX-License-Identifier: Apache-2.0
"""How users read, keep and set the random state of a device."""

from __future__ import annotations

from typing import Sequence

import torch

from ipufit.emulator._executor.weight_sync import WeightSync
from ipufit.emulator._layout.device_rng import DeviceRng, check_rng_state


class RngState(WeightSync):
    """What an executor does with the random state of its device.

    The host keeps the state that it saw last; each attaching begins there.
    """

    @property
    def rng_state(self) -> list[int] | None:
        """The random state of the device: the seed, then the generator's state.

        Setting it continues elsewhere; a list of a seed alone begins at that seed.
        It is kept while the model is detached. After `destroy()` the next compilation
        begins with the state that was read, set, saved by `detachFromDevice()` or
        given by `Options.randomSeed` last.

        It is None before the first call of a model whose options have no seed.

        Raises:
            Error: Not compiled.
            ValueError: Something else than a random state is set.

        Example:
            >>> from ipufit.emulator import Options, inferenceModel
            >>> dropout = torch.nn.Dropout()
            >>> inference = inferenceModel(dropout, Options().randomSeed(42))
            >>> inference.compile(torch.ones(8))
            >>> inference.rng_state
            [42]
            >>> first = inference(torch.ones(8))
            >>> inference.rng_state = [42]
            >>> torch.equal(inference(torch.ones(8)), first)
            True
        """
        self._require_compiled()
        self._save_rng_state()
        return self._rng_state

    @rng_state.setter
    def rng_state(self, state: Sequence[int] | None) -> None:
        self._require_compiled()
        self._rng_state = check_rng_state(state or [])
        self._is_rng_state_stale = False
        if self._rng is not None:
            self._rng.restore(self._rng_state)

    def _start_rng(self) -> DeviceRng:
        """Give a device that is attached its random state."""
        self._rng = DeviceRng(torch.initial_seed())
        if self._rng_state is not None:
            self._rng.restore(self._rng_state)
        return self._rng

    def _save_rng_state(self) -> None:
        """Read the device's state, if it has changed."""
        if self._is_rng_state_stale and self._rng is not None:
            self._rng_state = self._rng.save()
            self._is_rng_state_stale = False

    def _drop_rng(self) -> None:
        """The device is gone, and with it what wasn't saved."""
        self._rng = None
        self._is_rng_state_stale = False
