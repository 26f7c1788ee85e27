# SPDX-License-Identifier: Apache-2.0
"""Batches of calls, through PopTorch's loader.

Training drops what doesn't fill a call and counts it; inference pads the last call
and says how many rows are real.
"""

from __future__ import annotations

from typing import Any, Iterator

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.errors import DataError
from ipufit.types import Batch

from .adapters import Source, StackedRows


class TrainingBatches:
    """The calls of a training epoch.

    Args:
        source: The samples.
        plan: How many make a call.
        options: Of the training model.
        shuffle: Draw a new order every epoch.
        seed: Of the orders; None for torch's global generator.

    Raises:
        DataError: There are not enough samples for one call.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        options: poptorch.Options,
        *,
        shuffle: bool,
        seed: int | None = None,
    ) -> None:
        needed = plan.samples_per_call
        if source.num_samples < needed:
            raise DataError(
                f"`x` has {source.num_samples} samples, but one training call takes "
                f"{plan.describe()}. Lower one of these, or pass more data."
            )
        self.num_calls = source.num_samples // needed
        self.num_dropped = source.num_samples % needed
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._loader = poptorch.DataLoader(
            options,
            source.dataset,
            batch_size=plan.micro_batch_size,
            shuffle=shuffle,
            drop_last=True,
            collate_fn=collate,
            generator=generator,
        )

    def __len__(self) -> int:
        """Calls per epoch."""
        return self.num_calls

    def __iter__(self) -> Iterator[Batch]:
        """The batches of one epoch."""
        return iter(self._loader)


class InferenceBatches:
    """The calls that cover every sample once, in order.

    Args:
        source: The samples.
        plan: How many rows make a call.
        options: Of the inference model.
    """

    def __init__(
        self, source: Source, plan: BatchPlan, options: poptorch.Options
    ) -> None:
        self._num_samples = source.num_samples
        self._rows = plan.samples_per_call
        self.num_calls = -(-source.num_samples // self._rows)
        padded = _Padded(
            source.dataset, source.num_samples, self.num_calls * self._rows
        )
        self._loader = poptorch.DataLoader(
            options,
            padded,
            batch_size=plan.micro_batch_size,
            drop_last=True,
            collate_fn=collate,
        )

    def __len__(self) -> int:
        """Calls."""
        return self.num_calls

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        """Each batch with its number of real rows; padding comes after them."""
        remaining = self._num_samples
        for batch in self._loader:
            yield batch, min(remaining, self._rows)
            remaining -= self._rows


class _Padded(Dataset):  # type: ignore[type-arg]
    """A dataset made longer by repeating its last sample."""

    def __init__(self, dataset: Dataset[Any], num_samples: int, length: int) -> None:
        self._dataset: Any = dataset
        self._last = num_samples - 1
        self._length = length
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = self._gather

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._dataset[min(int(index), self._last)]

    def _gather(self, indices: list[int]) -> Any:
        rows = [min(index, self._last) for index in indices]
        return self._dataset.__getitems__(rows)


def collate(samples: Any) -> Batch:
    """Stack samples into the tensors of a call.

    Raises:
        DataError: They can't be stacked.

    Example:
        >>> [t.shape for t in collate([(torch.zeros(3), 1), (torch.zeros(3), 0)])]
        [torch.Size([2, 3]), torch.Size([2])]
    """
    if isinstance(samples, StackedRows):
        return list(samples)
    try:
        tensors: list[Tensor] = list(default_collate(samples))
    except RuntimeError as error:
        raise DataError(
            "Samples of different shapes can't share a call, because the shapes of a "
            f"compiled model are fixed: {error}. Pad or crop them to one shape."
        ) from error
    return tensors
