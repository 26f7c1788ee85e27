# SPDX-License-Identifier: Apache-2.0
"""The random state of a device, apart from the host's.

PopTorch describes it by a list of integers: the seed, then the state of each tile.
Here the state is that of torch's generator, so a list means something to the emulator
only.
"""

from __future__ import annotations

import hashlib
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit.emulator._ground.logging import logger

_NUM_WORDS = torch.Generator().get_state().numel() // 4


class DeviceRng:
    """The random state of a device: torch's generator, apart from the host's.

    Args:
        seed: The seed of all processes of a run.
        process: The index of this process. Process 0 draws the numbers of the seed,
            each other process numbers of its own.

    Example:
        >>> rng = DeviceRng(seed=1)
        >>> with rng:
        ...     first = torch.rand(2)
        >>> with DeviceRng(seed=1):
        ...     print(torch.equal(torch.rand(2), first))
        True
    """

    def __init__(self, seed: int, process: int = 0) -> None:
        self._seed = seed
        self._process = process
        self._state = self._seeded(seed).get_state()
        self._host_state: Tensor | None = None

    def __enter__(self) -> None:
        self._host_state = torch.random.get_rng_state()
        torch.random.set_rng_state(self._state)

    def __exit__(self, *exception: object) -> None:
        if self._host_state is not None:
            self._state = torch.random.get_rng_state()
            torch.random.set_rng_state(self._host_state)

    def _seeded(self, seed: int) -> torch.Generator:
        if self._process:
            text = f"{seed} {self._process}".encode()
            seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
        return torch.Generator().manual_seed(seed)

    def save(self) -> list[int]:
        """Return the state as a list: the seed, then torch's state in 32-bit words."""
        logger.debug("Reading random seed")
        logger.debug("Reading RNG state")
        return [self._seed, *self._state.numpy().view(np.uint32).tolist()]

    def restore(self, state: Sequence[int]) -> None:
        """Set the state to a list from `save`, or seed it with a list of a seed.

        Raises:
            ValueError: `state` is neither.

        Example:
            >>> rng = DeviceRng(seed=1)
            >>> saved = rng.save()
            >>> with rng:
            ...     first = torch.rand(2)
            >>> rng.restore(saved)
            >>> with rng:
            ...     print(torch.equal(torch.rand(2), first))
            True
        """
        seed, *words = check_rng_state(state)
        logger.debug("Setting random seed to %d", seed)
        generator = self._seeded(seed)
        if words:
            logger.debug("Setting RNG state")
            generator.set_state(
                torch.from_numpy(np.array(words, dtype=np.uint32).view(np.uint8))
            )
        self._seed, self._state = seed, generator.get_state()


def check_rng_state(state: Sequence[int]) -> list[int]:
    """Check a list that describes a random state, and return a copy.

    Args:
        state: A seed alone, or a seed and the words of a state.

    Raises:
        ValueError: The list has another length, or a word has more than 32 bits.

    Example:
        >>> check_rng_state([42])
        [42]
        >>> check_rng_state([42, 1])
        Traceback (most recent call last):
            ...
        ValueError: A random state is a list of a seed, or of a seed and ... Got 2 ...
    """
    integers = list(state)
    if len(integers) not in (1, 1 + _NUM_WORDS):
        raise ValueError(
            "A random state is a list of a seed, or of a seed and the state that "
            f"`rng_state` gave ({1 + _NUM_WORDS} integers in all). Got "
            f"{len(integers)} of them; a list from real IPUs can't be used here."
        )
    if not all(0 <= word < 2**32 for word in integers[1:]):
        raise ValueError(
            "The words of a random state have 32 bits: it isn't one that `rng_state` "
            "of the emulator gave."
        )
    return integers
