# SPDX-License-Identifier: Apache-2.0
"""The order in which samples of a map-style dataset are taken."""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from .seeded import mixed


class Position(NamedTuple):
    """Where training is in its data.

    Attributes:
        number: Number of the pass, from 0; each pass has an order of its own.
        calls: Calls of that pass that were given out.
    """

    number: int = 0
    calls: int = 0


BEGINNING = Position()


class Order(Sampler[int]):
    """Every index once; then the last one again, up to a length.

    With a seed each pass has a new order. It depends on the seed and the number of the
    pass alone, so that a resumed run, or another process, finds the same order.

    Args:
        count: Number of samples.
        length: Number of indices in a pass.
        seed: Seed of the orders; None keeps the samples' own order.
        start: Position at which the first pass begins.
        rows_per_call: Samples of one call, in which `start` counts.
        tells_pass: Whether to give keys of `SeededRows`, which contain the number of
            the pass, instead of indices.
    """

    def __init__(
        self,
        count: int,
        length: int,
        seed: int | None = None,
        start: Position = BEGINNING,
        rows_per_call: int = 1,
        *,
        tells_pass: bool = False,
    ) -> None:
        self._count = count
        self._length = length
        self._seed = seed
        self._number = start.number
        self._tells_pass = tells_pass
        self._skipped = start.calls * rows_per_call

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        yield from self.indices().tolist()

    def indices(self) -> Tensor:
        """The indices of the next pass, `[length]`; fewer if it begins midway."""
        order: Any
        if self._seed is None:
            order = torch.arange(self._count)
        else:
            generator = torch.Generator().manual_seed(mixed(self._seed, self._number))
            order = torch.randperm(self._count, generator=generator)
        if self._length > self._count:
            missing = self._length - self._count
            order = torch.cat((order, order[-1:].expand(missing)))
        if self._tells_pass:
            order = order + self._number * self._count
        rest: Tensor = order[self._skipped :]
        self._skipped = 0
        self._number += 1
        return rest


class InOrder(Sampler[int]):
    """Every index in order, then others; both padded to whole calls.

    Args:
        count: Number of samples.
        rows: Samples of one call.
        further: Indices that follow in calls of their own.
    """

    def __init__(self, count: int, rows: int, further: list[int]) -> None:
        self._count = count
        padding = [count - 1] * (-count % rows)
        self._rest = padding + further + further[-1:] * (-len(further) % rows)

    def __len__(self) -> int:
        return self._count + len(self._rest)

    def __iter__(self) -> Iterator[int]:
        yield from self.indices().tolist()

    def indices(self) -> Tensor:
        """All indices."""
        return torch.cat((torch.arange(self._count), torch.tensor(self._rest).long()))
