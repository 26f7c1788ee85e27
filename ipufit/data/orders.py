# SPDX-License-Identifier: Apache-2.0
"""The order of samples that are taken by index."""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from .seeded import mixed


class Position(NamedTuple):
    """Where training is in its data.

    Attributes:
        number: Of the pass, from 0; each has an order of its own.
        calls: Of that pass that were given out.
    """

    number: int = 0
    calls: int = 0


BEGINNING = Position()


class Order(Sampler[int]):
    """Every index once, then the last one again up to a length.

    With a seed the order is drawn anew for each pass, from the seed and the pass's
    number alone: a run that is resumed, or a process that loads, finds the same.

    Args:
        count: Samples.
        length: Indices to give in a pass.
        seed: None for no shuffling.
        start: Where to begin.
        rows_per_call: What `start` counts in.
        tells_pass: Give keys of `SeededRows`, which tell the pass, instead of indices.
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
        """The next pass, `[length]`; less what `start` skips."""
        order: Any
        if self._seed is None:
            order = torch.arange(self._count)
        else:
            generator = torch.Generator().manual_seed(mixed(self._seed, self._number))
            order = torch.randperm(self._count, generator=generator)
        missing = self._length - self._count
        if missing > 0:
            order = torch.cat((order, order[-1:].expand(missing)))
        if self._tells_pass:
            order = order + self._number * self._count
        skipped, self._skipped = self._skipped, 0
        self._number += 1
        rest: Tensor = order[skipped:]
        return rest


class InOrder(Sampler[int]):
    """Every index in order, the last again up to whole calls, then further ones."""

    def __init__(self, count: int, rows: int, further: list[int]) -> None:
        self._count = count
        self._padding = -count % rows
        self._further = further + further[-1:] * (-len(further) % rows)

    def __len__(self) -> int:
        return self._count + self._padding + len(self._further)

    def __iter__(self) -> Iterator[int]:
        yield from self.indices().tolist()

    def indices(self) -> Tensor:
        """All of them."""
        further = [self._count - 1] * self._padding + self._further
        return torch.cat((torch.arange(self._count), torch.tensor(further).long()))
