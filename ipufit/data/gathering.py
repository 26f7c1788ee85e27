# SPDX-License-Identifier: Apache-2.0
"""Gathers the calls of samples in memory by index, without a loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

from ipufit.types import Batch

from .datasets import ArrayDataset
from .orders import InOrder, Order


@dataclass(frozen=True, eq=False)
class GatheredCalls:
    """The whole calls of each pass over tensors, with copies of their rows.

    A loader would take the order apart into single indices and put them together again
    for each batch, which takes most of the time of a small call.

    Args:
        dataset: Samples in memory.
        order: Order of the samples; gives new indices, or keys, for each pass.
        rows: Number of rows of a call.

    Example:
        >>> import torch
        >>> calls = GatheredCalls(ArrayDataset([torch.arange(5)]), Order(5, 5), 2)
        >>> [call[0].tolist() for call in calls]
        [[0, 1], [2, 3]]
    """

    dataset: ArrayDataset
    order: Order | InOrder
    rows: int

    def __iter__(self) -> Iterator[Batch]:
        indices = self.order.indices()
        if self.dataset.rows is not None:  # keys have the number of the pass in them
            indices = indices.remainder(len(self.dataset))
        for first in range(0, len(indices) - self.rows + 1, self.rows):
            part = indices[first : first + self.rows]
            yield self.dataset.gathered(part)

    def terminate(self) -> None:
        """Do nothing: unlike a loader, this has no processes to end."""
