# SPDX-License-Identifier: Apache-2.0
"""Seeds the random numbers of samples that are loaded in other processes.

The random state of such a process can't be saved. So each sample has a seed of its own,
made of the seed of the run, the number of the pass and the index of the sample. A run
that is resumed in mid-epoch, or with another number of processes, draws the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

from torch.utils.data import Dataset

from .datasets import ArrayDataset, FlatDataset
from .seeds import mixed, seed_all


@dataclass(frozen=True, eq=False)
class SeededRows(Dataset):  # type: ignore[type-arg]
    """A map-style dataset that seeds all random numbers before it loads a sample.

    Args:
        seed: Seed of the run.

    Example:
        >>> import torch
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
        return self.dataset[self._begun(key)]

    def __getitems__(self, keys: Sequence[int]) -> Any:
        """A batch of samples: torch's loaders use this method if it exists."""
        indices = [int(key) % len(self) for key in keys]
        if isinstance(self.dataset, ArrayDataset):
            return self.dataset.__getitems__(indices)
        if not isinstance(self.dataset, FlatDataset):
            return [self[key] for key in keys]
        users = self.dataset.dataset
        return self.dataset.batch(
            indices, lambda places: [users[self._begun(keys[at])] for at in places]
        )

    def _begun(self, key: int) -> int:
        """The index of a sample, whose random numbers are seeded now."""
        number, index = divmod(int(key), len(self))
        seed_all(mixed(self.seed, number, index))
        return index
