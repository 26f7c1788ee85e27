# SPDX-License-Identifier: Apache-2.0
"""Gathers the calls of samples in memory by index, without a loader."""

from __future__ import annotations

from typing import Iterator, Sequence

import torch
from torch import Tensor

from ipufit.types import Batch

from .orders import InOrder, Order


class GatheredCalls:
    """The whole calls of each pass over tensors, with copies of their rows.

    A loader would take the order apart into single indices and put them together again
    for each batch, which takes most of the time of a small call.

    Args:
        tensors: Tensors of equal lengths.
        order: Order of the rows; gives new indices for each pass.
        rows: Number of rows of a call.

    Example:
        >>> calls = GatheredCalls([torch.arange(5)], Order(5, 5), rows=2)
        >>> [call[0].tolist() for call in calls]
        [[0, 1], [2, 3]]
    """

    def __init__(
        self, tensors: Sequence[Tensor], order: Order | InOrder, rows: int
    ) -> None:
        self._tensors = tensors
        self._order = order
        self._rows = rows

    def __iter__(self) -> Iterator[Batch]:
        indices = self._order.indices()
        for first in range(0, len(indices) - self._rows + 1, self._rows):
            part = indices[first : first + self._rows]
            yield [torch.index_select(tensor, 0, part) for tensor in self._tensors]

    def terminate(self) -> None:
        """Do nothing: unlike a loader, this has no processes to end."""
