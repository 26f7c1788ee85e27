# SPDX-License-Identifier: Apache-2.0
"""Rows of calls, cut into groups whose figures are computed at once."""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple

from torch import Tensor

from ipufit._tree import Structure, tree_map
from ipufit.data import Labels

from .coverage import cut, joined
from .traced.output_bytes import bytes_of

_MOST_BYTES = 2**20


class Rows(NamedTuple):
    """Rows of outputs with their labels.

    Attributes:
        outputs: Outputs of the model.
        labels: Their labels.
        num_rows: Number of the rows.
    """

    outputs: Any
    labels: Labels
    num_rows: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        values = self.outputs, tuple(self.labels)
        leaves = Structure.of_outputs(values).flatten(values)
        return bytes_of(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def cut(self, first: int, last: int) -> Rows:
        """The rows from one to another, without a copy."""
        if last - first == self.num_rows:
            return self
        rows = slice(first, last)
        labels = Labels(*cut(tuple(self.labels), rows))
        return Rows(cut(self.outputs, rows), labels, last - first)

    def copied(self, *, outputs_too: bool) -> Rows:
        """The same with labels in memory of their own, and outputs if asked for."""
        labels = Labels(*tree_map(_copied, tuple(self.labels)))
        outputs = tree_map(_copied, self.outputs) if outputs_too else self.outputs
        return self._replace(outputs=outputs, labels=labels)

    def laid_out(self) -> Rows:
        """The same in memory that is laid out row by row.

        Programs of other calls may lay out the same outputs otherwise, and a sum goes
        over memory in its order.
        """
        outputs = tree_map(_laid_out, self.outputs)
        return self._replace(outputs=outputs)


class WaitingRows:
    """Outputs of calls with the labels of their rows, until they make a group.

    Loss and metrics of a group take some twenty operations, which cost the same for ten
    rows as for ten thousand. Sums of other groups differ in their last bits. So groups
    are the same however many rows a call has: whole passes that fill a mebibyte, or
    single passes.

    Args:
        rows_per_pass: Rows of a forward pass.
        by_pass: Whether each pass is a group by itself.

    Example:
        >>> import torch
        >>> waiting = WaitingRows(rows_per_pass=2, by_pass=True)
        >>> for value in (1.0, 2.0):
        ...     outputs = torch.full((3,), value)
        ...     for group in waiting.groups(outputs, Labels(torch.zeros(3)), 3):
        ...         print(group.outputs)
        tensor([1., 1.])
        tensor([1., 2.])
        tensor([2., 2.])
        >>> bool(waiting)
        False
    """

    def __init__(self, rows_per_pass: int, *, by_pass: bool) -> None:
        self._rows_per_pass = rows_per_pass
        self._by_pass = by_pass
        self._parts: list[Rows] = []
        self._num_rows = 0
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def num_rows(self) -> int:
        """Number of rows that wait."""
        return self._num_rows

    @property
    def num_parts(self) -> int:
        """Number of calls whose rows wait."""
        return len(self._parts)

    def groups(self, outputs: Any, labels: Labels, num_rows: int) -> Iterator[Rows]:
        """Give the groups that rows of a call complete, and keep the rows left over.

        Args:
            outputs: Outputs of the model, in tensors of their own.
            labels: Labels of the rows. Those that wait are copied: asynchronous loaders
                use memory again.
            num_rows: Number of the rows.
        """
        if not num_rows:
            return
        rows = Rows(outputs, labels, num_rows)
        size = self._size = self._size or self._size_of_groups(rows)
        done = 0
        if self._parts and self._num_rows + num_rows >= size:
            done = size - self._num_rows
            self._keep(rows.cut(0, done))
            group = self.all()
            self.clear()
            yield group
        while num_rows - done >= size:
            yield rows.cut(done, done + size)
            done += size
        if done < num_rows:
            self._keep(rows.cut(done, num_rows).copied(outputs_too=done > 0))

    def _keep(self, rows: Rows) -> None:
        self._parts.append(rows)
        self._num_rows += rows.num_rows

    def _size_of_groups(self, rows: Rows) -> int:
        if self._by_pass:
            return self._rows_per_pass
        num_bytes = self._rows_per_pass * rows.num_bytes // rows.num_rows
        return self._rows_per_pass * max(1, _MOST_BYTES // max(1, num_bytes))

    def all(self, first: int = 0) -> Rows:
        """All rows that wait, and go on waiting.

        Args:
            first: Calls whose rows are left out, from the beginning.
        """
        parts = self._parts[first:]
        outputs, labels = joined((one.outputs, tuple(one.labels)) for one in parts)
        return Rows(outputs, Labels(*labels), sum(one.num_rows for one in parts))

    def clear(self) -> None:
        """Drop the rows: they were counted."""
        self._parts.clear()
        self._num_rows = 0


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _laid_out(leaf: Any) -> Any:
    return leaf.contiguous() if isinstance(leaf, Tensor) else leaf
