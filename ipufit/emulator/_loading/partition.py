# SPDX-License-Identifier: Apache-2.0
"""One process's share of a map-style dataset."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset


class Partition(Dataset[Any]):
    """The contiguous block of a dataset that one of several processes reads.

    With `drop_last` all blocks have the same length, a multiple of the combined
    batch, and what is behind the blocks is left over. Otherwise the blocks cover the
    dataset, and the first ones are one element longer if they must.

    With a seed, each `shuffle` draws one permutation of the whole dataset, the same
    in every process, and the block is a block of the permutation. Its offset
    alternates between two places, `leftovers` apart, beginning with the later one.

    As in PopTorch the leftovers of the shuffle are `len(dataset) % length`, which can
    be less than what lies outside the blocks. As there, only the permutation is in
    shared memory: persistent workers keep the offset of their first epoch.

    Args:
        dataset: The whole dataset; needs a length.
        process_index: Number of this process, from 0 on.
        num_processes: Number of processes that share the dataset.
        combined_batch_size: Elements that one process takes per call.
        drop_last: Whether all processes get the same number of full batches.
        seed: Seed common to all processes; None if the data is never shuffled.

    Raises:
        ZeroDivisionError: If `drop_last` leaves nothing to any process.

    Example:
        >>> block = Partition("abcdefghij", 1, 2, 2, drop_last=True, seed=None)
        >>> [block[index] for index in range(len(block))]
        ['e', 'f', 'g', 'h']
    """

    def __init__(
        self,
        dataset: Any,
        process_index: int,
        num_processes: int,
        combined_batch_size: int,
        *,
        drop_last: bool,
        seed: int | None,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        size = len(dataset)
        if drop_last:
            per_call = combined_batch_size * num_processes
            self._length = combined_batch_size * (size // per_call)
            if self._length == 0:
                raise ZeroDivisionError(
                    f"The dataset has {size} elements, but one call takes {per_call} "
                    f"= {combined_batch_size} per process * {num_processes} processes. "
                    "Pass more data, a smaller batch, or drop_last=False."
                )
            self._base_offset = process_index * self._length
            self._leftovers = size % self._length
        else:
            share, remainder = divmod(size, num_processes)
            self._length = share + (process_index < remainder)
            self._base_offset = process_index * share + min(process_index, remainder)
            self._leftovers = 0
        self._offset = self._base_offset
        self._permutation: torch.Tensor | None = None
        self._generator_state: torch.Tensor | None = None
        # torch asks for it by name, to fetch several elements at once.
        if getattr(dataset, "__getitems__", None):
            self.__getitems__ = self._getitems

    def shuffle(self) -> None:
        """Draw the permutation of the next epoch and move the block."""
        generator = torch.Generator()
        if self._generator_state is not None:
            generator.set_state(self._generator_state)
        elif self._seed is not None:
            generator.manual_seed(self._seed)
        permutation = torch.randperm(len(self._dataset), generator=generator)
        self._generator_state = generator.get_state()
        if self._permutation is None:
            permutation.share_memory_()  # type: ignore[no-untyped-call]
            self._permutation = permutation
        else:  # in place: persistent workers see it
            self._permutation.copy_(permutation)
        is_at_base = self._offset == self._base_offset
        self._offset = self._base_offset + (self._leftovers if is_at_base else 0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[self._source_index(index)]

    def _getitems(self, indices: list[Any]) -> Any:
        return self._dataset.__getitems__([self._source_index(i) for i in indices])

    def _source_index(self, index: Any) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(
                f"Index {int(index)} is outside this process's {self._length} elements."
            )
        if self._permutation is None:
            return self._offset + index
        return self._permutation[self._offset + index]
