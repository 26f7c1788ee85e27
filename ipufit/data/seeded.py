# SPDX-License-Identifier: Apache-2.0
"""Seeds the random numbers of samples that are loaded in other processes.

The random state of such a process can't be saved. So each sample has a seed of its own,
made of the seed of the run, the number of the pass and the index of the sample. A run
that is resumed in mid-epoch, or with another number of processes, draws the same.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


def mixed(*numbers: int) -> int:
    """A seed of 63 bits, made of several numbers; other numbers give another seed.

    Example:
        >>> mixed(1, 2) == mixed(1, 2), mixed(1, 2) == mixed(2, 1)
        (True, False)
    """
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_all(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and torch.

    Args:
        seed: Number of 63 bits.

    Example:
        >>> seed_all(3)
        >>> first = random.random(), float(torch.rand(()))
        >>> seed_all(3)
        >>> first == (random.random(), float(torch.rand(())))
        True
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed asks all devices


@dataclass(frozen=True, eq=False)
class SeededRows(Dataset):  # type: ignore[type-arg]
    """A map-style dataset that seeds all random numbers before it loads a sample.

    Args:
        seed: Seed of the run.

    Example:
        >>> from torch.utils.data import Dataset
        >>> class Noise(Dataset):
        ...     def __len__(self):
        ...         return 3
        ...     def __getitem__(self, index):
        ...         return torch.rand(())
        >>> rows = SeededRows(Noise(), seed=1)
        >>> rows[2] == rows[2], rows[2] == rows[2 + 3]  # of the next pass
        (tensor(True), tensor(False))
    """

    dataset: Any
    seed: int

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.dataset)

    def __getitem__(self, key: int) -> Any:
        """One sample. Its key is its index + number of the pass * number of samples."""
        number, index = divmod(int(key), len(self))
        seed_all(mixed(self.seed, number, index))
        return self.dataset[index]
