# SPDX-License-Identifier: Apache-2.0
"""Sources whose samples come in batches, and passes over a stream.

A stream is any iterable of batches, such as a loader. A block is the list of tensors of
one of its batches, flattened; blocks may differ in their numbers of rows. A call takes
its rows from as many blocks as it needs.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from typing import Any, Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit._poptorch import custom_parser, poptorch
from ipufit._tree import Structure
from ipufit.distributed import Processes, warn_in_first_process
from ipufit.errors import DataError, WholeStreamWarning

from .arrays import as_tensor, same_rows
from .datasets import ALONE, Source
from .loaders import DividedLoader, KerasBatches, describe, generators_of, plain_values
from .place import LoaderState, StreamState
from .random_state import HostRandomState, random_state, set_random_state
from .structure import NOTHING, SampleStructure


class Pass:
    """Iterator over the blocks of one pass over a stream.

    Args:
        iterable: Iterable of batches.
        block_of: Converts a batch to a block.
        generators: Random generators, besides the global ones, that the iterable
            draws from.
        resumed: State at which another process has stopped; None for a new pass.
        is_stateful: Whether the iterable has a state, for which rows are stored.

    Attributes:
        iterator: Iterator over the batches.
        num_drawn: Number of batches that this process has drawn.
        first: A block that was drawn already and is returned first, or None.
        last: The last rows that were drawn, if the iterable has a state; empty
            before the first block.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        block_of: Callable[[Any], list[Tensor]],
        generators: Sequence[torch.Generator] = (),
        resumed: StreamState | None = None,
        *,
        is_stateful: bool = False,
    ) -> None:
        loader = None if resumed is None else resumed.loader
        self._iterable: Any = iterable
        self._block_of = block_of
        self._generators = generators
        self._is_stateful = is_stateful
        self._repeated = resumed if loader is None else None
        if self._repeated is not None:
            set_random_state(self._repeated.at_start, generators)
        self._before = StreamState(0, {}, {})  # drawn by the interrupted run
        if resumed is not None and loader is not None:
            self._before = resumed
        self._at_start = self._at_last = HostRandomState(generators)
        self.num_drawn = 0
        self._num_rows = 0
        self._has_ended = loader is not None and loader.has_ended
        self.iterator: Iterator[Any] = iter(() if self._has_ended else iterable)
        self.first: list[Tensor] | None = None
        self.last: list[Tensor] = []
        if loader is not None:
            self.last = loader.rows
            self._num_rows = loader.num_drawn
            if loader.num_left:
                self.first = [leaf[-loader.num_left :] for leaf in loader.rows]

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self

    def __next__(self) -> list[Tensor]:
        block, self.first = self.first, None
        if block is None:
            block = self._block_of(self.draw())
            self.keep(block)
        return block

    def keep(self, block: list[Tensor]) -> None:
        """Keep a block that was drawn, for the state of the pass."""
        if self._is_stateful:
            self._num_rows += len(block[0])
            self.last = block

    def draw(self) -> Any:
        """Return the next batch of the iterable."""
        repeated = self._repeated
        if repeated is not None and self.num_drawn + 1 == repeated.num_batches:
            set_random_state(repeated.at_last, self._generators)
        at_last = HostRandomState(self._generators)
        try:
            batch = next(self.iterator)
        except StopIteration:
            self._has_ended = True
            raise
        self.num_drawn += 1
        self._at_last = at_last
        return batch

    @property
    def skips(self) -> bool:
        """Whether the pass leaves out rows that the interrupted run has used."""
        return self._before.loader is not None

    def replay(self) -> StreamState:
        """Return the state of the pass without the state of a loader."""
        before = self._before
        return StreamState(
            before.num_batches + self.num_drawn,
            before.at_start or self._at_start.tensors(),
            self._at_last.tensors()
            if self.num_drawn or not before.at_last
            else before.at_last,
        )

    def state_dict(self, num_taken: int) -> StreamState:
        """Return the state of the pass.

        Args:
            num_taken: Number of rows that calls have taken.
        """
        if not self._is_stateful:
            return self.replay()
        left = max(0, self._num_rows - num_taken)
        rows = [leaf[-max(left, 1) :].clone() for leaf in self.last]
        state = self._iterable.state_dict()
        loader = LoaderState(state, rows, left, self._num_rows, self._has_ended)
        return self.replay()._replace(loader=loader)


class RowsAreNoSamplesError(Exception):
    """Raised if a loader doesn't return one row for each index."""


class StreamSource(Source):
    """Samples that come in blocks, such as the batches of a loader.

    The first block is drawn at once, to find the structure of samples. The first pass
    returns it again, so that no batch is drawn twice.

    In several processes a pass begins with the random states of process 0, so that
    streams that shuffle have the same order in all processes.

    Args:
        blocks: An iterable of batches as the user makes them.
        parts_of: Splits a batch into inputs, targets and weights.
        name: Name of the data in error messages.
        num_samples: Number of samples of all processes; None if unknown.
        processes: Processes that divide the samples.
        is_part: Whether the stream has the samples of this process only.
        divided_loader: Loads only the samples of this process, in place of `blocks`;
            None to read all samples.

    Raises:
        DataError: The stream is empty, its first batch can't be used, or it isn't the
            same in all processes.

    Attributes:
        rows_of_first: Number of samples in the first block.
        is_stateful: Whether the stream has `state_dict` and `load_state_dict`, as in
            torchdata's protocol.
        num_validated: Number of batches that validations have used of a generator,
            which the next validation goes on with; 0 for other streams.
    """

    def __init__(
        self,
        blocks: Iterable[Any],
        parts_of: Callable[[Any], Sequence[Any]],
        *,
        name: str,
        num_samples: int | None = None,
        processes: Processes = ALONE,
        is_part: bool = False,
        divided_loader: DividedLoader | None = None,
    ) -> None:
        # The structure is known after the first batch.
        super().__init__(SampleStructure(NOTHING), num_samples, name)
        self._iterable: Any = blocks if divided_loader is None else divided_loader
        self._parts_of = parts_of
        self.is_stateful = divided_loader is None and all(
            callable(getattr(blocks, method, None))
            for method in ("state_dict", "load_state_dict")
        )
        self._processes = processes
        self.is_part = is_part
        self.divided_loader = divided_loader
        self.generators = generators_of(blocks)
        self.rows_of_first = 0
        begun = self._new_pass()
        # PopTorch's accessor is its own iterator, but can be iterated over again.
        is_accessor = isinstance(blocks, poptorch.AsynchronousDataAccessor)
        self.is_one_shot = begun.iterator is blocks and not is_accessor
        try:
            batch = begun.draw()
        except StopIteration:
            pass
        else:
            begun.first = self._take_first(batch)
            begun.keep(begun.first)
        if processes.are_several:
            self._agree(begun.first)
        elif not self._first:
            raise DataError(f"`{name}` has no samples.")
        self._begun: Pass | None = begun
        self._only_pass = begun if self.is_one_shot else None
        self.num_validated = 0
        self._values = plain_values(self._iterable)

    def _take_first(self, batch: Any) -> list[Tensor]:
        """Set the structure of samples, and return the first block of a pass."""
        loader = self.divided_loader
        parts = self._parts_of(batch if loader is None else loader.peek(batch[:1]))
        self.structure = self._structure_of(parts)
        block = self._flatten(parts)
        if not len(block[0]):
            raise DataError(f"The first batch of `{self.name}` has no rows.")
        self._first = [leaf[0].clone() for leaf in block]
        if loader is None:
            self.rows_of_first = len(block[0])
            return block
        if len(block[0]) != 1:
            raise RowsAreNoSamplesError
        self.rows_of_first = len(batch)
        return list(batch)

    def _agree(self, first: Any) -> None:
        """Compare the beginning of the stream with other processes.

        Raises:
            DataError: There are no samples; or the processes have different samples,
                although the stream isn't marked as divided.
        """
        digest = hashlib.sha256()
        for leaf in first or ():  # tensors of a block, or indices
            if isinstance(leaf, Tensor):
                whole = leaf.contiguous().reshape(-1).view(torch.uint8)
                digest.update(whole.numpy().data)
            else:
                digest.update(repr(leaf).encode())
        seen = (digest.hexdigest(), self.structure, bool(self._first))
        all_seen = self._processes.gathered(seen)
        structures = [structure for _, structure, is_filled in all_seen if is_filled]
        if not structures:
            raise DataError(f"`{self.name}` has no samples.")
        if self.is_part:
            if len(structures) < len(all_seen):
                firsts = self._processes.gathered(self._first)
                self.structure = structures[0]
                self._first = self._first or next(first for first in firsts if first)
                self.rows_of_first = self.rows_of_first or 1
            return
        if len({digest for digest, *_ in all_seen}) > 1:
            raise DataError(
                f"`{self.name}` begins with other samples in one process than in "
                "another. If it gives each of them a part, give it (or its dataset) "
                "the attribute is_divided = True; otherwise have it shuffle with the "
                "same seed everywhere."
            )
        if self.divided_loader is None:
            warn_in_first_process(
                f"Each of the {self._processes.count} processes reads all of "
                f"`{self.name}` and keeps its share of every batch. Have the dataset "
                "give each process a part, by ipufit.distributed.get_process_info() in "
                "__iter__, and set its attribute is_divided = True; or pass a dataset "
                "with __getitem__, which is read only where its samples are used.",
                WholeStreamWarning,
            )

    def state_dict(self) -> StreamState | None:
        """Return the state between two passes; None before the first pass."""
        if self._begun is not None:
            return self._begun.state_dict(num_taken=0)
        if not self.is_stateful:
            return None
        loader = LoaderState(self._iterable.state_dict(), [], has_ended=True)
        return StreamState(0, {}, {}, loader)

    def load_state_dict(
        self, state: StreamState | None, *, is_due: bool
    ) -> StreamState | None:
        """Continue where a pass of another process stopped.

        Batches are drawn again, unless the stream has a `load_state_dict`. A generator
        can't begin anew, and stays as it is.

        Args:
            state: State of the pass; None before the first pass.
            is_due: Whether no row of the pass was used: its first block is drawn now.

        Returns:
            The argument for `blocks`; None to begin the next pass.

        Raises:
            DataError: The stream can't take the state.
        """
        if self.is_one_shot:
            return None
        if state is not None and not self.is_stateful:
            state = state._replace(loader=None)
        loader = None if state is None else state.loader
        if loader is not None:
            try:
                self._iterable.load_state_dict(loader.state)
                if loader.has_ended:
                    # The loaded state is at the end of a pass. Iterating now may draw
                    # random numbers; the next pass begins as in an unbroken run.
                    iter(self._iterable)
            except Exception as error:  # the user's code may raise any error
                raise DataError(
                    f"`{self.name}` can't go on from the state that the checkpoint has "
                    f"of it: {error!r}. Pass a loader with the same dataset and "
                    "settings."
                ) from error
        self._begun = None
        is_between = loader is not None and loader.is_between
        if state is None or not state.at_start or is_between:
            return None
        if not is_due:
            return state
        self._begun = self._new_pass(state)
        if loader is None:
            self._begun.first = next(self._begun)
        self._values = plain_values(self._iterable)
        return None

    def count_validated(self) -> None:
        """Count the batches that validations have used of a generator."""
        if self._only_pass is not None:
            self.num_validated = self._only_pass.num_drawn

    def skip_validated(self, num_batches: int) -> None:
        """Draw the batches of a generator that an interrupted run has validated on."""
        if self._only_pass is not None:
            self.num_validated = num_batches
            deque(itertools.islice(self._only_pass, num_batches), maxlen=0)

    def begin_epoch(self) -> None:
        """Call a hook of Keras's dataset."""
        if isinstance(self._iterable, KerasBatches):
            self._iterable.begin_epoch()

    def end_epoch(self) -> None:
        """Call a hook of Keras's dataset."""
        if isinstance(self._iterable, KerasBatches):
            self._iterable.end_epoch()

    def blocks(self, resumed: StreamState | None = None) -> Pass:
        """Return the blocks of the next pass.

        Args:
            resumed: Result of `load_state_dict`; None to begin anew.
        """
        begun, self._begun = self._begun, None
        if begun is not None and resumed is None:
            if self.is_one_shot or plain_values(self._iterable) == self._values:
                return begun
            # A callback has changed the data since, as `sampler.set_epoch` does.
            resumed = begun.replay()
        return Pass((), self.block_of) if self.is_one_shot else self._new_pass(resumed)

    def _new_pass(self, resumed: StreamState | None = None) -> Pass:
        if resumed is None and self._processes.are_several:
            state = self._processes.first(random_state(self.generators))
            set_random_state(state, self.generators)
        return Pass(
            self._iterable,
            self.block_of if self.divided_loader is None else list,
            self.generators,
            resumed,
            is_stateful=self.is_stateful,
        )

    def _structure_of(self, parts: Sequence[Any]) -> SampleStructure:
        return SampleStructure.of(parts)

    def _flatten(self, parts: Sequence[Any]) -> list[Tensor]:
        where = f"A batch of `{self.name}`"
        return same_rows(self.structure.flatten_like("the first", parts, where), where)

    def block_of(self, batch: Any) -> list[Tensor]:
        """Flatten a batch, which must look like the first batch.

        Raises:
            DataError: The structure, a dtype or a shape differs.
        """
        block = self._flatten(self._parts_of(batch))
        paths = [*self.structure.paths(), "the mask"]
        for path, leaf, first in zip(paths, block, self._first):
            if leaf.shape[1:] != first.shape or leaf.dtype != first.dtype:
                what = "samples" if self.structure.rows is None else path
                raise DataError(
                    f"A batch of `{self.name}` has {what} of {leaf.dtype} and shape "
                    f"{tuple(leaf.shape[1:])}, and the first had {first.dtype} and "
                    f"{tuple(first.shape)}. The shapes of a compiled model are fixed: "
                    "pad or crop samples to one shape."
                )
        return block


class WholeSource(StreamSource):
    """Source of `FixedSizeBatches`: each whole micro-batch is a row, `[1, ...]`.

    The last tensor of a row is the mask.
    """

    def _structure_of(self, parts: Sequence[Any]) -> SampleStructure:
        inputs, targets, weights = [
            NOTHING if part is None else Structure.of_batch(part, custom_parser)
            for part in parts[:3]
        ]
        return SampleStructure(
            inputs, targets, weights, is_padded=True, rows=len(parts[3])
        )

    def _flatten(self, parts: Sequence[Any]) -> list[Tensor]:
        structure, where = self.structure, f"A batch of `{self.name}`"
        leaves = structure.flatten_like("the first", parts, where)
        paths, mask = structure.paths(), parts[3]
        for path, leaf in zip(paths, leaves):
            if not isinstance(leaf, (Tensor, np.ndarray, np.generic, int, float)):
                raise DataError(
                    f"{where} has {describe(leaf)} as its {path}, for which PopTorch "
                    "has no parser. Register one, poptorch.registerCustomArgParser("
                    f"{type(leaf).__name__}, parser), or give tensors in a dict. The "
                    "parser of PyG's types comes with `import poptorch_geometric`."
                )
        tensors = [as_tensor(leaf, where) for leaf in leaves]
        for path, tensor in list(zip(paths, tensors))[structure.num_inputs :]:
            if tensor.shape[:1] != mask.shape:
                raise DataError(
                    f"{where} has {path} of shape {tuple(tensor.shape)}, and a mask of "
                    f"{len(mask)} rows: give one row for each entry of the mask."
                )
        return [tensor.unsqueeze(0) for tensor in (*tensors, mask)]
