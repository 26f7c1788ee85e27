# SPDX-License-Identifier: Apache-2.0
"""Makes batches of one size of blocks of any size, and pads the last."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ipufit.errors import DataError
from ipufit.types import Batch

from .datasets import StackedRows
from .source import Block


def shares(
    num_real: int,
    rows: int,
    rows_per_update: int,
    num_of_all: Tensor | None = None,
    num_processes: int = 1,
) -> Tensor:
    """How much each row of a call counts in the loss of its update.

    Args:
        num_real: Number of real rows; they come before the padding.
        rows: Number of rows of the call.
        rows_per_update: Number of rows of one update; divides `rows`.
        num_of_all: Number of real rows of all processes in each update; None if there
            is one process.
        num_processes: Number of processes, which have as many rows each.

    Returns:
        `[rows]`, float32: 0 for padding. The real rows of an update add up to the
        number of its rows, over all processes, so that the mean over all rows is the
        mean over real rows.

    Example:
        >>> shares(3, rows=6, rows_per_update=2)
        tensor([1., 1., 2., 0., 0., 0.])
        >>> shares(1, 2, 2, num_of_all=torch.tensor([3]), num_processes=2)
        tensor([1.3333, 0.0000])
    """
    is_real = torch.arange(rows).lt(num_real).to(torch.float32)
    per_update = is_real.reshape(-1, rows_per_update)
    if num_of_all is None:
        num_of_all = per_update.sum(dim=1)
    counts = num_of_all.unsqueeze(1).clamp(min=1)
    return torch.flatten(per_update * (rows_per_update * num_processes / counts))


def pad(batch: Sequence[Tensor], rows: int) -> Batch:
    """The batch with its last row repeated up to `rows`.

    Example:
        >>> pad([torch.tensor([1, 2])], 4)
        [tensor([1, 2, 2, 2])]
    """
    missing = rows - len(batch[0])
    if not missing:
        return list(batch)
    return [torch.cat([t, t[-1:].expand(missing, *t.shape[1:])]) for t in batch]


def rebatched(blocks: Iterable[Block], rows: int) -> Iterator[tuple[Batch, int]]:
    """Cuts and joins blocks of any number of rows into batches of `rows`.

    Rows that wait for the next block are copied, because an asynchronous loader uses
    its memory again.

    Args:
        blocks: Blocks of the same structure.
        rows: Number of rows of a batch.

    Yields:
        A batch and its number of rows, which is less than `rows` only at the end.

    Example:
        >>> blocks = [[torch.tensor([1, 2])], [torch.tensor([3])]]
        >>> [batch[0].tolist() for batch, _ in rebatched(blocks, 2)]
        [[1, 2], [3]]
    """
    kept: list[Block] = []
    num_kept = 0
    for block in blocks:
        at, size = 0, len(block[0])
        while size - at >= rows - num_kept:
            end = at + rows - num_kept
            kept.append([leaf[at:end] for leaf in block])
            yield _joined(kept), rows
            kept, num_kept, at = [], 0, end
        if at < size:
            kept.append([leaf[at:].clone() for leaf in block])
            num_kept += size - at
    if num_kept:
        yield _joined(kept), num_kept


def _joined(parts: Sequence[Block]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return [torch.cat(leaves) for leaves in zip(*parts)]


def first_rows(blocks: Iterator[Block], most: int | None) -> Iterator[Block]:
    """The blocks up to `most` rows in all; every block if `most` is None."""
    if most is None:
        yield from blocks
        return
    if not most:
        return  # a generator would lose what is drawn of it
    for block in blocks:
        yield [leaf[:most] for leaf in block]
        most -= min(most, len(block[0]))
        if not most:
            return


def collate(samples: Any) -> Batch:
    """Stack flat samples into the tensors of a call.

    Raises:
        DataError: The samples have different shapes.

    Example:
        >>> [t.shape for t in collate([(torch.zeros(3), 1), (torch.zeros(3), 0)])]
        [torch.Size([2, 3]), torch.Size([2])]
    """
    if isinstance(samples, StackedRows):
        return list(samples)
    try:
        return list(default_collate(samples))
    except RuntimeError as error:
        raise DataError(
            "Samples of different shapes can't share a call, because the shapes of a "
            f"compiled model are fixed: {error}. Pad or crop them to one shape."
        ) from error
