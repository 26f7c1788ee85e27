# SPDX-License-Identifier: Apache-2.0
"""One pass over a stream, which a resumed run can repeat up to its position."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .carrying import carried
from .host_random import HostRandomState, RandomState, set_random_state
from .loader_states import LoaderState


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
        kept: State that the iterable goes on from, so that nothing is repeated; None to
            begin, or to repeat.
        is_stateful: Whether the iterable keeps a state, for which rows are kept.

    Attributes:
        iterator: Iterator over the batches.
        first: A block that was drawn already and is given out first, or None.
        last: The block that was given out last; None if none is to be kept.
        num_rows: Number of rows that were given out, if a state is kept.

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
        kept: LoaderState | None = None,
        *,
        is_stateful: bool = False,
    ) -> None:
        self._block_of = block_of
        self._generators = generators
        self._replayed = replay if kept is None else None
        self._before = replay if kept is not None else None
        self._num_blocks = 0
        if self._replayed is not None:
            set_random_state(self._replayed.at_start, generators)
        self._at_start = self._at_last = HostRandomState(generators)
        self._has_ended = kept is not None and kept.has_ended
        self.iterator: Iterator[Any] = carried(() if self._has_ended else iterable)
        self.first: list[Tensor] | None = None
        self.last: list[Tensor] | None = None
        self._is_stateful = is_stateful
        self.num_rows = 0
        if kept is not None:
            self.last = kept.rows
            self.num_rows = kept.num_drawn - kept.num_left
            if kept.num_left:
                self.first = [leaf[-kept.num_left :] for leaf in kept.rows]

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self

    def __next__(self) -> list[Tensor]:
        block, self.first = self.first, None
        if block is None:
            block = self._block_of(self.draw())
        if self._is_stateful:
            self.num_rows += len(block[0])
            self.last = block
        return block

    def draw(self) -> Any:
        """The next batch, as the iterable gives it."""
        replayed = self._replayed
        if replayed is not None and self._num_blocks + 1 == replayed.num_blocks:
            set_random_state(replayed.at_last, self._generators)
        at_last = HostRandomState(self._generators)
        try:
            batch = next(self.iterator)
        except StopIteration:
            self._has_ended = True
            raise
        self._num_blocks += 1
        self._at_last = at_last
        return batch

    def replay(self) -> Replay:
        """The state with which the blocks drawn so far can be drawn again."""
        start, last = self._at_start.tensors(), self._at_last.tensors()
        if self._before is None:
            return Replay(self._num_blocks, start, last)
        drawn = self._before.num_blocks
        at_last = last if self._num_blocks else self._before.at_last
        return Replay(drawn + self._num_blocks, self._before.at_start, at_last)

    def kept(self, state: Any, num_given: int) -> LoaderState:
        """The state from which the pass goes on without drawing anything again.

        Args:
            state: The state of the iterable now.
            num_given: Number of rows that calls have taken.
        """
        left = max(0, self.num_rows - num_given)
        rows = [leaf[-max(left, 1) :].clone() for leaf in self.last or ()]
        return LoaderState(state, rows, left, self.num_rows, self._has_ended)


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
