# SPDX-License-Identifier: Apache-2.0
"""The order in which samples are taken, and which process takes which of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ipufit.batching import BatchPlan
from ipufit.distributed import Processes

from .random_state import mixed


class Position(NamedTuple):
    """Where training is in its data.

    Attributes:
        number: Number of the pass, from 0; each pass has an order of its own.
        calls: Calls of that pass that were given out, as each process counts them.
    """

    number: int = 0
    calls: int = 0


BEGINNING = Position()


def padded(indices: Tensor, length: int) -> Tensor:
    """Repeat the last index up to a length.

    Example:
        >>> padded(torch.tensor([3, 4]), 4)
        tensor([3, 4, 4, 4])
    """
    missing = max(length - len(indices), 0)
    return torch.cat((indices, indices[-1:].expand(missing)))


@dataclass(frozen=True)
class Division:
    """Divides the rows of a call between processes, in blocks of one update.

    So an update has the same samples whatever the number of processes. In inference
    blocks are passes: a process has the same samples however many passes a call has.

    Attributes:
        index: Number of this process, from 0.
        count: Number of processes.
        block: Rows of a block.
        rows: Rows of a call of one process; a multiple of `block`.

    Example:
        >>> division = Division(index=1, count=2, block=2, rows=4)
        >>> division.own(torch.arange(8))
        tensor([2, 3, 6, 7])
        >>> division.num_of_each(7)
        (4, 3)
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

    def own(self, rows: Tensor) -> Tensor:
        """Select the rows of this process.

        Args:
            rows: `[rows, ...]`; a multiple of the blocks of all processes.
        """
        if self.count == 1:
            return rows
        blocks = rows.reshape(-1, self.count, self.block, *rows.shape[1:])
        return torch.flatten(blocks[:, self.index], 0, 1)

    def num_of_each(self, num_rows: int) -> tuple[int, ...]:
        """Count the rows of each process among the first ones, in their order."""
        whole, rest = divmod(num_rows, self.block * self.count)
        return tuple(
            whole * self.block + min(max(rest - index * self.block, 0), self.block)
            for index in range(self.count)
        )

    def num_in_updates(self, num_of_each: tuple[int, ...]) -> Tensor:
        """Count the real rows of all processes in each update of a call.

        Args:
            num_of_each: Real rows of each process; they come before its padding.
        """
        first = torch.arange(0, self.rows, self.block)
        counts = [(number - first).clamp(0, self.block) for number in num_of_each]
        in_updates: Tensor = torch.stack(counts).sum(dim=0)
        return in_updates


@dataclass(eq=False)
class Order(Sampler[int]):
    """Gives every index once; then the last one again, up to a length.

    With a seed each pass has a new order. It depends on the seed and the number of the
    pass alone, so that a resumed run, or another process, finds the same order.

    Args:
        count: Number of samples.
        length: Number of indices in a pass.
        seed: Seed of the orders; None keeps the samples' own order.
        start: Position at which the next pass begins.
        division: The indices of one process are given out, of whole calls.
        tells_pass: Whether to give keys of `FlatDataset`, which contain the number of
            the pass, instead of indices.
    """

    count: int
    length: int
    seed: int | None
    start: Position
    division: Division
    tells_pass: bool = False

    def __iter__(self) -> Iterator[int]:
        yield from self.indices().tolist()

    def indices(self) -> Tensor:
        """Return the indices of the next pass; fewer if it begins midway."""
        number, calls = self.start
        self.start = Position(number + 1)
        order: Any = torch.arange(self.count)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(mixed(self.seed, number))
            order = torch.randperm(self.count, generator=generator)
        order = padded(order, self.length)[: self.length]
        if self.tells_pass:
            order = order + number * self.count
        return self.division.own(order[calls * self.division.rows_of_all :])
