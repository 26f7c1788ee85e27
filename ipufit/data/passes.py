# SPDX-License-Identifier: Apache-2.0
"""One pass over a stream, which a run that is resumed repeats up to its place."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .host_random import HostRandomState, RandomState, set_random_state


class Replay(NamedTuple):
    """What it takes to have the same blocks again.

    Samplers and transforms draw random numbers, and so do others between two blocks.
    Blocks before the last one are dropped, so that one counts, and the order.

    Attributes:
        num_blocks: That were drawn.
        at_start: The random states when the pass began.
        at_last: Those before the last block was drawn.
    """

    num_blocks: int
    at_start: RandomState
    at_last: RandomState


class Pass:
    """The blocks of one pass.

    Args:
        iterable: Gives batches.
        block_of: Makes blocks of them.
        generators: Of random numbers, that the iterable draws from.
        replay: The pass that is repeated; None for a new one.

    Attributes:
        iterator: The iterable's.
        first: A block that was drawn, and is to be given out first; None for none.

    Example:
        >>> list(Pass([1, 2], lambda batch: [torch.tensor(batch)]))
        [[tensor(1)], [tensor(2)]]
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        block_of: Callable[[Any], list[Tensor]],
        generators: Sequence[torch.Generator] = (),
        replay: Replay | None = None,
    ) -> None:
        self._block_of = block_of
        self._generators = generators
        self._replayed = replay
        self._num_blocks = 0
        if replay is not None:
            set_random_state(replay.at_start, generators)
        self._at_start = self._at_last = HostRandomState(generators)
        self.iterator: Iterator[Any] = iter(iterable)
        self.first: list[Tensor] | None = None

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self

    def __next__(self) -> list[Tensor]:
        if self.first is not None:
            first, self.first = self.first, None
            return first
        return self._block_of(self.draw())

    def draw(self) -> Any:
        """The next batch, as it comes."""
        replayed = self._replayed
        if replayed is not None and self._num_blocks + 1 == replayed.num_blocks:
            set_random_state(replayed.at_last, self._generators)
        at_last = HostRandomState(self._generators)
        batch = next(self.iterator)
        self._num_blocks += 1
        self._at_last = at_last
        return batch

    def replay(self) -> Replay:
        """What it takes to have the blocks again that were drawn."""
        return Replay(
            self._num_blocks, self._at_start.tensors(), self._at_last.tensors()
        )


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a torch loader was given, its samplers' included.

    Args:
        loader: Any iterable; one that is no torch loader has none that we know of.

    Returns:
        Each once.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> own = torch.Generator()
        >>> generators_of(DataLoader([1, 2], shuffle=True, generator=own)) == [own]
        True
    """
    if not isinstance(loader, DataLoader):
        return []
    batch_sampler: Any = loader.batch_sampler
    inner = getattr(batch_sampler, "sampler", None)
    owners = (loader, loader.sampler, batch_sampler, inner)
    found = [getattr(owner, "generator", None) for owner in owners]
    unique = {id(one): one for one in found if isinstance(one, torch.Generator)}
    return list(unique.values())
