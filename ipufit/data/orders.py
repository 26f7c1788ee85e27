# SPDX-License-Identifier: Apache-2.0
"""The order in which samples of a map-style dataset are taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from .division import Division
from .seeds import mixed


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
