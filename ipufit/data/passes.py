# SPDX-License-Identifier: Apache-2.0
"""One pass over a stream, which a resumed run can repeat up to its position."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .host_random import HostRandomState, RandomState, set_random_state


class Replay(NamedTuple):
    """The state of a pass, with which the same blocks can be drawn again.

    Samplers and transforms draw random numbers, and so may others between two blocks.
    Blocks before the last one are drawn again only to be dropped, so that their order
    and the random state before the last block are all that matters.

    Attributes:
        num_blocks: Number of blocks that were drawn.
        at_start: Random states when the pass began.
        at_last: Random states before the last block was drawn.
    """

    num_blocks: int
    at_start: RandomState
    at_last: RandomState


class Pass:
    """The blocks of one pass over a stream.

    Args:
        iterable: Gives batches.
        block_of: Makes a block of a batch.
        generators: Random generators, besides the global ones, that the iterable
            draws from.
        replay: State of the pass to repeat; None for a new pass.

    Attributes:
        iterator: Iterator over the batches.
        first: A block that was drawn already and is given out first, or None.

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
        """The next batch, as the iterable gives it."""
        replayed = self._replayed
        if replayed is not None and self._num_blocks + 1 == replayed.num_blocks:
            set_random_state(replayed.at_last, self._generators)
        at_last = HostRandomState(self._generators)
        batch = next(self.iterator)
        self._num_blocks += 1
        self._at_last = at_last
        return batch

    def replay(self) -> Replay:
        """The state with which the blocks drawn so far can be drawn again."""
        return Replay(
            self._num_blocks, self._at_start.tensors(), self._at_last.tensors()
        )


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a torch loader and its samplers were given, each once.

    Args:
        loader: Any iterable; only a torch loader has generators that can be found.

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
