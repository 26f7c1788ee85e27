# SPDX-License-Identifier: Apache-2.0
"""Rows of several calls, kept until their figures are computed at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ipufit._tree import Structure, tree_map
from ipufit.data import Labels

from .coverage import joined

_MOST_BYTES = 2**20


class WaitingRows:
    """Outputs of calls with the labels of their rows.

    Loss and metrics of a call take some twenty operations, which cost the same for ten
    rows as for ten thousand. Rows that fill a mebibyte wait no longer.

    Example:
        >>> import torch
        >>> waiting = WaitingRows()
        >>> for value in (1.0, 2.0):
        ...     waiting.add(torch.full((2,), value), Labels(torch.zeros(2)), 2)
        >>> outputs, labels, num_rows = waiting.all()
        >>> outputs, num_rows
        (tensor([1., 1., 2., 2.]), 4)
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Any, tuple[Any, ...]]] = []
        self._num_rows = 0
        self._row_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def is_full(self) -> bool:
        """Whether the rows should be counted now."""
        return self._num_rows * self._row_bytes >= _MOST_BYTES

    def add(self, outputs: Any, labels: Labels, num_rows: int) -> None:
        """Keep the rows of a call.

        Args:
            outputs: Outputs of the model, in tensors of their own.
            labels: Labels, which are copied: asynchronous loaders use memory again.
            num_rows: Number of the rows.
        """
        part = outputs, tree_map(_copied, tuple(labels))
        if not self._row_bytes:
            self._row_bytes = -(-_num_bytes(part) // num_rows)
        self._num_rows += num_rows
        self._parts.append(part)

    def all(self) -> tuple[Any, Labels, int]:
        """Outputs, labels and number of all rows, which go on waiting."""
        outputs, labels = joined(self._parts)
        return outputs, Labels(*labels), self._num_rows

    def clear(self) -> None:
        """Drop the rows: they were counted."""
        self._parts.clear()
        self._num_rows = self._row_bytes = 0


def _num_bytes(values: Any) -> int:
    leaves = Structure.of_outputs(values).flatten(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
