# SPDX-License-Identifier: Apache-2.0
"""Random numbers of samples that are loaded in other processes.

What a transform draws there depends on the process's own state, which nobody can save.
So each sample has a seed of its own instead, made of the run's, the pass's number and
the sample's index: a run that is resumed in mid-epoch, or with other numbers of
processes, draws the same.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any, Sized, cast

import numpy as np
import torch
from torch.utils.data import Dataset


def mixed(*numbers: int) -> int:
    """A seed of 63 bits, made of several numbers; neighbouring ones don't share any.

    Example:
        >>> mixed(1, 2) == mixed(1, 2), mixed(1, 2) == mixed(2, 1)
        (True, False)
    """
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's numbers.

    Args:
        seed: Of 63 bits.

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


class SeededRows(Dataset):  # type: ignore[type-arg]
    """A map-style dataset, loaded with Python's, NumPy's and torch's numbers seeded.

    Args:
        dataset: The samples.
        seed: Of the run.

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

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        """The number of samples."""
        return len(cast(Sized, self._dataset))

    def __getitem__(self, key: int) -> Any:
        """A sample: the key is its index, plus its pass times the number of samples."""
        number, index = divmod(int(key), len(self))
        seed_all(mixed(self._seed, number, index))
        return self._dataset[index]
