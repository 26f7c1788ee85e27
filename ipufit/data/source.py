# SPDX-License-Identifier: Apache-2.0
"""Samples, wherever they come from: by index, or as a stream of blocks."""

from __future__ import annotations

import abc
import hashlib
import warnings
from typing import Any, Callable, Iterable, Iterator, List, Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.distributed import Processes, times_asked
from ipufit.errors import DataError, WholeStreamWarning

from .datasets import ArrayDataset
from .host_random import random_state, set_random_state
from .loader_states import LoaderState, is_stateful, load_state
from .own_loading import OwnLoading
from .passes import Pass, Replay, generators_of
from .ranges import check_integers
from .stream_kinds import may_divide_unseen
from .structure import NOTHING, SampleStructure
from .values import same_rows

ALONE = Processes()

Block = List[Tensor]
"""Stacked samples: the leaves of a structure, with dim 0 counting rows."""


class Source(abc.ABC):
    """Samples of one structure.

    Args:
        structure: How a sample nests.
        num_samples: Number of samples; None if unknown.
        name: Name of the data in error messages.

    Attributes:
        batch_size: Batch size of the user's own loader; None if there is none.
        dataset: Map-style dataset of the samples; None for a stream.
        generators: Random generators that the user's own loader draws from.
        is_one_shot: Whether the samples can be gone through only once.
        num_certain: Number of samples of a pass, if it is certain; None else. An
            example has that of its data.
        num_ahead: Number of samples that workers of the user's own loader load ahead;
            None without such.
    """

    def __init__(
        self, structure: SampleStructure, num_samples: int | None, name: str = "x"
    ) -> None:
        self.structure = structure
        self.num_samples = num_samples
        self.name = name
        self.batch_size: int | None = None
        self.dataset: Any = None
        self.generators: Sequence[torch.Generator] = ()
        self.is_one_shot = False
        self.num_certain: int | None = None
        self.num_ahead: int | None = None

    @property
    def is_in_memory(self) -> bool:
        """Whether the samples are arrays, of which any number is there at once."""
        return isinstance(self.dataset, ArrayDataset)

    @abc.abstractmethod
    def first(self) -> list[Tensor]:
        """The leaves of the first sample."""

    def require_targets(self, name: str, purpose: str) -> None:
        """Refuse samples without targets.

        Raises:
            DataError: Samples have no targets, or targets or weights are no numbers.
        """
        targets, weights = self.structure.targets, self.structure.weights
        if not weights.num_leaves and weights != NOTHING:
            raise DataError(
                f"The sample weights of `{name}` are no numbers: the first is "
                f"{weights.rebuild([])!r}."
            )
        if not targets.num_leaves and targets != NOTHING:
            raise DataError(
                f"The targets of `{name}` are no numbers: the first is "
                f"{targets.rebuild([])!r}. Encode them as numbers."
            )
        if not targets.num_leaves:
            raise DataError(
                f"`{name}` has no targets to {purpose} with: pass y, or a dataset of "
                "pairs (input, target)."
            )

    def example(self, rows: int, *, inputs_only: bool = False) -> list[Tensor]:
        """A batch that holds the first sample `rows` times, in shared memory."""
        leaves = self.first()
        if inputs_only:
            leaves = leaves[: self.structure.num_inputs]
        return [leaf.expand(rows, *leaf.shape) for leaf in leaves]

    def check(self, batch: Sequence[Tensor], sample_of: Callable[[int], int]) -> None:
        """Refuse numbers that an IPU can't hold; arrays were checked when they came.

        Args:
            batch: Tensors of a call.
            sample_of: Gives the index of the sample in a row of the batch.

        Raises:
            DataError: An integer needs more than 32 bits.
        """
        if not isinstance(self.dataset, ArrayDataset):
            check_integers(batch, self.structure, self.name, sample_of)


class IndexedSource(Source):
    """Samples of a map-style dataset.

    Args:
        dataset: Items are flat tuples: the leaves of `structure`.
        structure: How the leaves nest.
        num_samples: Number of samples.
        name: Name of the data in error messages.
    """

    num_samples: int

    def __init__(
        self,
        dataset: Any,
        structure: SampleStructure,
        num_samples: int,
        name: str = "x",
    ) -> None:
        super().__init__(structure, num_samples, name)
        self.dataset = dataset
        self.num_certain = num_samples
        self._first: list[Tensor] = []

    def first(self) -> list[Tensor]:
        """The leaves of the first sample, which is read once."""
        if not self._first:
            self._first = list(self.dataset[0])
        return list(self._first)


class RowsAreNoSamplesError(Exception):
    """A loader makes rows of its own, not one of each index."""


class StreamSource(Source):
    """Samples that come in blocks, one block after the other.

    The first block is drawn at once, to see what samples look like. The first pass
    gives it out again, so that nothing is drawn twice.

    In several processes a pass begins with the random states of process 0, so that
    streams that shuffle give the same order everywhere.

    Args:
        blocks: An iterable of batches as the user makes them.
        parts_of: Takes a batch apart: inputs, targets, weights.
        name: Name of the data in error messages.
        num_samples: Number of samples of all processes; None if unknown.
        processes: Processes that divide the samples.
        is_own_part: Whether the stream gives samples of this process only; None to
            have it asked.
        own_loading: The stream's indices, and what loads samples of them, in the place
            of `blocks`; None if it isn't taken apart.

    Raises:
        DataError: The stream is empty, its first batch can't be used, or it isn't the
            same in all processes.

    Attributes:
        rows_of_first: Number of samples in the first block.
        is_own_part: Whether the stream gives samples of this process only.
        is_stateful: Whether the stream keeps a state, from which it can go on.
    """

    is_own_part = False

    def __init__(
        self,
        blocks: Iterable[Any],
        parts_of: Callable[[Any], Sequence[Any]],
        *,
        name: str,
        num_samples: int | None = None,
        processes: Processes = ALONE,
        is_own_part: bool | None = None,
        own_loading: OwnLoading | None = None,
    ) -> None:
        # What samples look like is known when the first are drawn.
        super().__init__(SampleStructure(NOTHING), num_samples, name)
        self._iterable = blocks if own_loading is None else own_loading
        self._parts_of = parts_of
        self._replay: Replay | None = None
        self._kept: LoaderState | None = None
        self.is_stateful = own_loading is None and is_stateful(blocks)
        self._processes = processes
        self.own_loading = own_loading
        self.generators = generators_of(blocks)
        self._first: list[Tensor] = []
        self.rows_of_first = 0
        times = times_asked()
        begun = self._new_pass()
        # PopTorch's accessor is its own iterator, but begins anew.
        is_accessor = isinstance(blocks, poptorch.AsynchronousDataAccessor)
        self.is_one_shot = begun.iterator is blocks and not is_accessor
        try:
            batch = begun.draw()
        except StopIteration:
            batch = None
        else:
            begun.first = self._take_first(batch)
        if processes.are_several:
            has_asked = times_asked() > times or getattr(batch, "has_asked", False)
            self.is_own_part = self._agree(has_asked, is_own_part, begun.first)
        elif not self._first:
            raise DataError(f"`{name}` has no samples.")
        self._begun: Pass | None = begun

    def _take_first(self, batch: Any) -> Block:
        """See what samples look like, and return the block that a pass gives first."""
        loading = self.own_loading
        given = batch if loading is None else loading.peek(batch[:1])
        parts = self._parts_of(given)
        self.structure = SampleStructure.of(parts)
        block = self._flatten(parts)
        if not len(block[0]):
            raise DataError(f"The first batch of `{self.name}` has no rows.")
        self._first = [leaf[0].clone() for leaf in block]
        if loading is None:
            self.rows_of_first = len(block[0])
            return block
        if len(block[0]) != 1:
            raise RowsAreNoSamplesError
        self.rows_of_first = len(batch)
        return list(batch)

    def _agree(self, has_asked: bool, is_own: bool | None, first: Any) -> bool:
        """Whether this process gets samples of its own, as all processes see it.

        Raises:
            DataError: There are no samples; or the processes get other samples, and
                nothing says that these are their parts.
        """
        seen = (has_asked, _digest(first), self.structure, len(self._first))
        all_seen = self._processes.gathered(seen)
        filled = [other for other in all_seen if other[-1]]
        if not filled:
            raise DataError(f"`{self.name}` has no samples.")
        are_same = len({digest for _, digest, *_ in all_seen}) == 1
        has_asked = any(asked for asked, *_ in all_seen)
        if not are_same and may_divide_unseen(self._iterable):
            is_own = True
        if is_own or has_asked:
            if len(filled) < len(all_seen):
                firsts = self._processes.gathered(self._first)
                self.structure = filled[0][2]
                self._first = self._first or next(one for one in firsts if one)
                self.rows_of_first = self.rows_of_first or 1
            elif are_same and not is_own and self._processes.is_first:
                warnings.warn(
                    f"`{self.name}` asks for the number of its process, and begins "
                    f"with the same samples in all {self._processes.count}. If they "
                    "all read the same, each sample counts several times: give each "
                    "process a part, or don't ask.",
                    WholeStreamWarning,
                    stacklevel=2,
                )
            return True
        if not are_same:
            raise DataError(
                f"`{self.name}` begins with other samples in one process than in "
                "another. If it gives each of them a part, have it ask ipufit."
                "distributed.get_process_info() in __iter__ for the number of the "
                "process; otherwise have it shuffle with the same seed everywhere."
            )
        if self._processes.is_first and self.own_loading is None:
            warnings.warn(
                f"Each of the {self._processes.count} processes reads all of "
                f"`{self.name}` and keeps its share of every batch. Have the dataset "
                "give each process a part, by ipufit.distributed.get_process_info() in "
                "__iter__; or pass a dataset with __getitem__, which is read only "
                "where its samples are used.",
                WholeStreamWarning,
                stacklevel=2,
            )
        return False

    def first(self) -> list[Tensor]:
        """The leaves of the first sample."""
        return list(self._first)

    @property
    def is_spent(self) -> bool:
        """Whether the samples were given out and can't come again."""
        return self.is_one_shot and self._begun is None

    def first_pass(self) -> Replay | None:
        """The state of the first pass, if none of it was given out yet."""
        return None if self._begun is None else self._begun.replay()

    def loader_state(self) -> Any:
        """The state of a stream that keeps one."""
        loader: Any = self._iterable
        return loader.state_dict()

    def go_on(
        self, replay: Replay | None, *, is_due: bool, kept: LoaderState | None = None
    ) -> None:
        """Have the next pass go on where that of an interrupted run was.

        It is repeated, unless the stream keeps a state. A generator can't begin anew,
        and stays as it is.

        Args:
            replay: State of the interrupted pass; None if none had begun.
            is_due: Whether that was the first pass, of which nothing was given out:
                its first block is drawn now.
            kept: State of the stream; None to repeat the pass.

        Raises:
            DataError: The stream can't take the state.
        """
        if self.is_one_shot:
            return
        self._begun, self._replay = None, replay
        if kept is not None:
            load_state(self._iterable, kept, self.name)
            self._kept = None if kept.is_between else kept
            return
        if is_due and replay is not None:
            self._begun = self._new_pass()
            self._begun.first = next(self._begun)

    def blocks(self) -> Pass | Iterator[Block]:
        """All blocks, from the beginning if the stream can begin anew."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            return begun
        return iter(()) if self.is_one_shot else self._new_pass()

    def _new_pass(self) -> Pass:
        replay, self._replay = self._replay, None
        kept, self._kept = self._kept, None
        if replay is None and self._processes.are_several:
            state = self._processes.first(random_state(self.generators))
            set_random_state(state, self.generators)
        block_of = self.block_of if self.own_loading is None else list
        return Pass(
            self._iterable,
            block_of,
            self.generators,
            replay,
            kept,
            is_stateful=self.is_stateful,
        )

    def _flatten(self, parts: Sequence[Any]) -> Block:
        where = f"A batch of `{self.name}`"
        return same_rows(self.structure.flatten_like("the first", parts, where), where)

    def block_of(self, batch: Any) -> Block:
        """The block of a batch, which must look like the first.

        Raises:
            DataError: It doesn't.
        """
        block = self._flatten(self._parts_of(batch))
        for leaf, first in zip(block, self._first):
            if leaf.shape[1:] != first.shape or leaf.dtype != first.dtype:
                raise DataError(
                    f"A batch of `{self.name}` has samples of {leaf.dtype} and shape "
                    f"{tuple(leaf.shape[1:])}, and the first had {first.dtype} and "
                    f"{tuple(first.shape)}. The shapes of a compiled model are fixed: "
                    "pad or crop samples to one shape."
                )
        return block


def _digest(first: Any) -> str:
    """A text that tells a block, or a list of indices, from others."""
    digest = hashlib.sha256()
    for leaf in first or ():
        if isinstance(leaf, Tensor):
            digest.update(leaf.contiguous().reshape(-1).view(torch.uint8).numpy())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
