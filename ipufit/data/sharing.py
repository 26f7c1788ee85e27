# SPDX-License-Identifier: Apache-2.0
"""Streams in several processes: what each takes of them, and when they end for all.

Before each call the processes add up how many samples they have for it. So all make
the same number of calls, however uneven the ends of their streams are.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Iterator, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.distributed import Processes
from ipufit.types import Batch

from .division import Division
from .rebatching import first_rows, pad, rebatched
from .source import Block, StreamSource

Part = Tuple[Batch, int]
"""Rows of one process, padded to a call or not, and how many of them are samples."""


class Shared(NamedTuple):
    """The rows of a call that one process has.

    Attributes:
        batch: Rows of a call, padded.
        num_real: Number of its rows that are samples; they come first.
        num_of_all: Sums over all processes of what was counted.
    """

    batch: Batch
    num_real: int
    num_of_all: Tensor


def shared(
    source: StreamSource,
    blocks: Iterator[Block],
    division: Division,
    processes: Processes,
    count: Callable[[int], Tensor],
    *,
    skipped: int = 0,
    max_rows: int | None = None,
    last: Sequence[Tensor] = (),
) -> Iterator[Shared]:
    """The calls of a pass over a stream, up to the one for which nobody has samples.

    Args:
        source: The stream.
        blocks: Its pass.
        division: The rows of each process.
        processes: All processes.
        count: Makes of the number of samples that this process has for a call what is
            to be added up over all processes.
        skipped: Number of calls to leave out at the beginning.
        max_rows: Number of samples of all processes after which to stop; None for all.
        last: The row before, of which nothing is left; empty at the beginning.
    """
    parts = endless(_parts(source, blocks, division, max_rows), source, last)
    for _ in itertools.islice(parts, skipped):  # now, not when the first call is asked
        pass
    return agreed(parts, division, processes, count)


def endless(
    parts: Iterator[Part], source: StreamSource, last: Sequence[Tensor] = ()
) -> Iterator[Part]:
    """The rows of this process for each call, then calls of one row that is no sample.

    It repeats the last row, as padding does, so that a resumed run has the same one.

    Args:
        parts: Rows of this process for each call.
        source: The stream, whose first sample is the row if `parts` is empty.
        last: The row before those of `parts`; empty if there is none.
    """
    for batch, num_real in parts:
        last = [leaf[-1:].clone() for leaf in batch]  # loaders use memory again
        yield batch, num_real
    while True:
        yield list(last or source.example(1)), 0


def agreed(
    parts: Iterator[Part],
    division: Division,
    processes: Processes,
    count: Callable[[int], Tensor],
) -> Iterator[Shared]:
    """Calls of what each process has, up to the one for which nobody has samples.

    Args:
        parts: Rows of this process for each call, from `endless`.
        division: As for `shared`.
        processes: As for `shared`.
        count: As for `shared`.
    """
    for batch, num_real in parts:
        num_of_all = processes.summed(count(num_real))
        if not num_of_all.any():
            return
        yield Shared(pad(batch, division.rows), num_real, num_of_all)


def _parts(
    source: StreamSource,
    blocks: Iterator[Block],
    division: Division,
    most: int | None,
) -> Iterator[Part]:
    """Rows of this process for each call."""
    if source.own_loading is not None:
        # Samples to leave out are loaded, too: transforms draw random numbers.
        own = _loaded(source, blocks, division, most)
        return rebatched(own, division.rows)
    if source.is_own_part:
        own_most = None if most is None else division.num_of_part(most)
        return rebatched(first_rows(blocks, own_most), division.rows)
    whole = rebatched(first_rows(blocks, most), division.rows_of_all)
    return (_cut(batch, count, division) for batch, count in whole)


def _cut(batch: Batch, count: int, division: Division) -> tuple[Batch, int]:
    """The rows of this process, of a batch for all that may lack some at the end."""
    whole = pad(batch, division.rows_of_all)
    return [division.own(leaf) for leaf in whole], division.num_own(count)


def _loaded(
    source: StreamSource,
    batches_of_indices: Iterator[Block],
    division: Division,
    most: int | None,
) -> Iterator[Block]:
    """The samples of this process, loaded by index."""
    loading: Any = source.own_loading
    indices = itertools.islice(itertools.chain.from_iterable(batches_of_indices), most)
    rows = division.rows_of_all
    own = division.own(torch.arange(rows)).tolist()
    size = min(division.block, source.rows_of_first)

    def groups() -> Iterator[list[object]]:
        while True:
            call = list(itertools.islice(indices, rows))
            if not call:
                return
            mine = [call[row] for row in own if row < len(call)]
            for at in range(0, len(mine), size):
                yield mine[at : at + size]

    return (source.block_of(batch) for batch in loading.load(groups()))
