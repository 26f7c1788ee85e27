# SPDX-License-Identifier: Apache-2.0
"""Which samples a pass takes, in which order, and which process has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ipufit.batching import BatchPlan
from ipufit.distributed import Processes

from .random_state import mixed


@dataclass(frozen=True)
class Division:
    """Rows that all processes share, in blocks that go to one after the other.

    Every update is divided, so that it has the same samples whatever the number of
    processes: blocks have the rows of one update. So it is with passes of inference,
    where a process has the same samples however many passes a call has.

    Attributes:
        index: Number of this process, from 0.
        count: Number of processes.
        block: Rows of a block.
        rows: Rows of a call of one process; a multiple of `block`.

    Example:
        >>> division = Division(index=1, count=2, block=2, rows=4)
        >>> division.own(torch.arange(8))
        tensor([2, 3, 6, 7])
        >>> division.num_own(7), division.num_of_each(7)
        (3, (4, 3))
        >>> division.num_of_part(3)
        1
    """

    index: int
    count: int
    block: int
    rows: int

    @classmethod
    def of(cls, processes: Processes, plan: BatchPlan) -> Division:
        """The division of the calls of a plan."""
        rows = plan.samples_per_call
        return cls(processes.index, processes.count, plan.samples_per_update, rows)

    @property
    def rows_of_all(self) -> int:
        """Rows of a call of all processes."""
        return self.rows * self.count

    @property
    def num_updates(self) -> int:
        """Updates of a call, or of whatever the blocks have the rows."""
        return self.rows // self.block

    def own(self, rows: Tensor) -> Tensor:
        """The rows of this process.

        Args:
            rows: `[rows, ...]`; a multiple of the blocks of all processes.
        """
        if self.count == 1:
            return rows
        blocks = rows.reshape(-1, self.count, self.block, *rows.shape[1:])
        return torch.flatten(blocks[:, self.index], 0, 1)

    def place_of(self, row: int) -> int:
        """The place of a row of this process among the rows of all.

        Args:
            row: Its place among those of this process.

        Example:
            >>> division = Division(index=1, count=2, block=2, rows=4)
            >>> [division.place_of(row) for row in range(4)]
            [2, 3, 6, 7]
        """
        block, place = divmod(row, self.block)
        return (block * self.count + self.index) * self.block + place

    def num_own(self, num_rows: int, index: int | None = None) -> int:
        """How many of the first rows belong to a process.

        They are the first ones of that process, too.

        Args:
            num_rows: Number of rows of all processes.
            index: Number of the process; None for this one.
        """
        if self.count == 1:
            return num_rows
        if index is None:
            index = self.index
        whole, rest = divmod(num_rows, self.block * self.count)
        return whole * self.block + min(max(rest - index * self.block, 0), self.block)

    def num_of_each(self, num_rows: int) -> tuple[int, ...]:
        """How many of the first rows belong to each process, in their order."""
        if self.count == 1:
            return (num_rows,)
        return tuple(self.num_own(num_rows, index) for index in range(self.count))

    def num_of_part(self, num_rows: int) -> int:
        """How many rows to take of this process's part of data that is divided.

        All processes take as many, and the first ones one more if they must.

        Args:
            num_rows: Number of rows of all processes.
        """
        return num_rows // self.count + (self.index < num_rows % self.count)

    def num_in_blocks(self, num_own: int) -> Tensor:
        """How many of the first rows of this process are in each block of a call."""
        first = torch.arange(0, self.rows, self.block)
        in_blocks: Tensor = (num_own - first).clamp(0, self.block)
        return in_blocks

    def num_in_updates(self, num_rows: int) -> Tensor:
        """How many of the first rows of all processes are in each update of a call."""
        each = self.block * self.count
        first = torch.arange(0, self.rows_of_all, each)
        in_updates: Tensor = (num_rows - first).clamp(0, each)
        return in_updates


class Position(NamedTuple):
    """Where training is in its data.

    Attributes:
        number: Number of the pass, from 0; each pass has an order of its own.
        calls: Calls of that pass that were given out, as each process counts them.
    """

    number: int = 0
    calls: int = 0


BEGINNING = Position()


@dataclass(eq=False)
class Order(Sampler[int]):
    """Every index once; then the last one again, up to a length.

    With a seed each pass has a new order. It depends on the seed and the number of the
    pass alone, so that a resumed run, or another process, finds the same order.

    Args:
        count: Number of samples.
        length: Number of indices in a pass.
        seed: Seed of the orders; None keeps the samples' own order.
        start: Position at which the next pass begins.
        rows_per_call: Samples of one call of all processes, in which `start` counts.
        tells_pass: Whether to give keys of `SeededRows`, which contain the number of
            the pass, instead of indices.
        division: The indices of one of several processes are given out, and `length`
            is a multiple of their call; None to give out all.
    """

    count: int
    length: int
    seed: int | None = None
    start: Position = BEGINNING
    rows_per_call: int = 1
    tells_pass: bool = False
    division: Division | None = None

    def __len__(self) -> int:
        return self.length // (1 if self.division is None else self.division.count)

    def __iter__(self) -> Iterator[int]:
        yield from self.indices().tolist()

    def indices(self) -> Tensor:
        """The indices of the next pass; fewer if it begins midway."""
        number, calls = self.start
        self.start = Position(number + 1)
        order: Any
        if self.seed is None:
            order = torch.arange(self.count)
        else:
            generator = torch.Generator().manual_seed(mixed(self.seed, number))
            order = torch.randperm(self.count, generator=generator)
        if self.length > self.count:
            order = torch.cat((order, order[-1:].expand(self.length - self.count)))
        if self.tells_pass:
            order = order + number * self.count
        first = calls * self.rows_per_call
        if self.division is not None:
            return self.division.own(order[first : self.length])
        rest: Tensor = order[first:]
        return rest


class InOrder(Sampler[int]):
    """Every index in order, then others; both padded to whole calls.

    Args:
        count: Number of samples.
        rows: Samples of one call of all processes.
        further: Indices that follow in calls of their own.
        division: The indices of one of several processes are given out; None to give
            out all.
    """

    def __init__(
        self,
        count: int,
        rows: int,
        further: list[int],
        division: Division | None = None,
    ) -> None:
        self._count = count
        self._division = division
        padding = [count - 1] * (-count % rows)
        self._rest = padding + further + further[-1:] * (-len(further) % rows)

    def __len__(self) -> int:
        length = self._count + len(self._rest)
        return length // (1 if self._division is None else self._division.count)

    def __iter__(self) -> Iterator[int]:
        yield from self.indices().tolist()

    def indices(self) -> Tensor:
        """All indices."""
        rest = torch.tensor(self._rest).long()
        order = torch.cat((torch.arange(self._count), rest))
        return order if self._division is None else self._division.own(order)
