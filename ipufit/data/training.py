# SPDX-License-Identifier: Apache-2.0
"""The data of training calls.

Samples that don't fill a call are dropped and counted, or the call is padded with rows
that count nothing.
"""

from __future__ import annotations

import itertools
from typing import Any, Iterator, Optional, Tuple

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.distributed import Processes
from ipufit.errors import DataError
from ipufit.mixing import Mixing
from ipufit.types import Batch

from .calls import PLAIN, Call, CallLoader, Loading
from .class_weights import ClassWeights
from .division import Division
from .host_random import RandomState, random_state, set_random_state
from .loader_states import LoaderState
from .mixed_rows import MixedRows
from .orders import BEGINNING, Order, Position
from .passes import Pass, Replay
from .rebatching import pad, rebatched, shares
from .sharing import shared
from .source import ALONE, Block, Source, StreamSource

_Rows = Tuple[Batch, int, int, Optional[Tensor]]
"""The batch of a call, its number of real rows and that of all processes; and how many
of those are in each update, where that needn't follow from their number."""


class TrainingBatches:
    """The calls of a pass over the data.

    Args:
        plan: The factors of a call.
        options: Options of the training model.
        shuffle: Whether to draw a new order for every pass. Streams keep their order.
        seed: Seed of the orders, of samples that other processes load, and of how
            samples are mixed; None draws one from torch's global generator.
        drop_last: True to leave out samples that don't fill a call; `"pad"` to fill
            the call with rows that don't count.
        class_weight: Class index to weight; None if all classes weigh the same.
        mixing: How samples are mixed; None if they aren't.
        loading: How map-style data is loaded.
        start: Position at which to begin. Samples before it are not loaded, except
            from a stream, whose batches are drawn and dropped.
        processes: Processes that divide each update. All of them take the order of
            process 0.

    Raises:
        ConfigError: Micro-batches have one sample, and samples are mixed.
        DataError: There are not enough samples for one call, or `class_weight` or
            `mixing` can't be used.

    Attributes:
        structure: How the tensors of a batch nest.
        position: Number of the pass, and of its calls that were given out.
        seed: Seed of the orders.
        is_seeded: Whether each sample has random numbers of its own.
        num_calls: Number of calls of a pass; None while unknown.
        num_dropped: Number of samples of all processes that a pass leaves out; None
            while unknown.
        num_empty_updates: Number of updates of the last call that have only padding.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        options: poptorch.Options,
        *,
        shuffle: bool,
        seed: int | None = None,
        drop_last: bool | str = True,
        class_weight: Any = None,
        mixing: Mixing | None = None,
        loading: Loading = PLAIN,
        start: Position = BEGINNING,
        processes: Processes = ALONE,
    ) -> None:
        self.source = source
        self.structure = source.structure
        self._class_weights: ClassWeights | None = None
        if class_weight is not None:
            self._class_weights = ClassWeights(class_weight, source.structure)
            self.structure = self._class_weights.structure
        self._rows = plan.samples_per_call
        self._processes = processes
        self._division = Division.of(processes, plan)
        rows_of_all = self._division.rows_of_all
        is_padding = drop_last in ("pad", False)
        count = source.num_samples
        if count is not None and count < rows_of_all and not is_padding:
            raise DataError(
                f"`x` has {count} samples, but one training call takes "
                f"{plan.describe()}. Lower one of these, pass more data, or pad with "
                "fit(drop_last='pad')."
            )
        # A loader of the user's may give fewer samples than it says.
        may_be_short = isinstance(source, StreamSource) or (count or 0) % rows_of_all
        self._is_padding = is_padding and bool(may_be_short)
        if self._is_padding:
            self.structure = self.structure.padded()
        self._mixed_rows: MixedRows | None = None
        if mixing is not None:
            self._mixed_rows = MixedRows(
                mixing, self.structure, source.example(1), plan, self._division
            )
            self.structure = self._mixed_rows.structure
        self.num_calls: int | None = None
        self.num_dropped: int | None = 0 if is_padding else None
        self.num_empty_updates = 0
        if count is not None:
            self._count(count)
        self.is_seeded = loading.seeds(source.dataset, processes)
        if shuffle or self.is_seeded or mixing is not None:
            if seed is None:
                # Drawn here and not in a process that loads: those copy this one.
                seed = int(torch.empty((), dtype=torch.int64).random_())
            seed = processes.first(seed)
        self.seed = seed or 0
        self._shuffle = shuffle
        own = self.seed if self.is_seeded else None
        self._loader = CallLoader(source.dataset, plan, options, loading, own)
        self.position = start
        self._pass: Pass | None = None
        self._is_exhausted = self._is_going_on = False
        self._kept: LoaderState | None = None

    def _count(self, num_samples: int, in_updates: Tensor | None = None) -> None:
        """Set the number of calls of a pass, and what its last call lacks.

        Args:
            num_samples: Number of samples of all processes.
            in_updates: How many of them are in each update of the last call; None if
                each call is full before the next begins.
        """
        if in_updates is not None and self._is_padding:
            self.num_calls = self.position.calls
            self.num_empty_updates = int(in_updates.eq(0).sum())
            return
        rows, num_updates = self._division.rows_of_all, self._division.num_updates
        self.num_calls, left = divmod(num_samples, rows)
        if left and self._is_padding:
            self.num_calls += 1
            self.num_empty_updates = (rows - left) // (rows // num_updates)
        else:
            self.num_dropped, self.num_empty_updates = left, 0

    # A run that is resumed ----------------------------------------------------

    def replay(self) -> Replay | None:
        """The state of the pass, with which its blocks can be drawn again.

        It is None if no pass has begun, and for samples that are taken by index, which
        needn't be drawn again.
        """
        if not isinstance(self.source, StreamSource):
            return None
        if self.position.calls and self._pass is not None:
            return self._pass.replay()
        return self.source.first_pass()

    def loader_state(self) -> LoaderState | None:
        """The state of a loader that keeps one; None if nothing was taken of it yet.

        Raises:
            DataError: The loader's own error.
        """
        source = self.source
        if not isinstance(source, StreamSource) or not source.is_stateful:
            return None
        if self.position.calls and self._pass is not None:
            taken = self.position.calls * self._rows_of_pass(source)
            return self._pass.kept(source.loader_state(), taken)
        if source.first_pass() is not None:
            return None
        return LoaderState(source.loader_state(), [], has_ended=True)

    def _rows_of_pass(self, source: StreamSource) -> int:
        """Rows of a call that are drawn in this process."""
        is_part = source.is_own_part or not self._processes.are_several
        return self._rows if is_part else self._division.rows_of_all

    def go_on(
        self, now: RandomState, replay: Replay | None, kept: LoaderState | None = None
    ) -> None:
        """Go on as the interrupted run would have, from its position.

        Args:
            now: Random states that the interrupted run had saved.
            replay: The result of `replay()` in the interrupted run.
            kept: The result of `loader_state()` in the interrupted run; it counts if
                the loader keeps a state now, too.
        """
        self._kept = None
        if isinstance(self.source, StreamSource):
            if not self.source.is_stateful:
                kept = None
            self.source.go_on(replay, is_due=not self.position.calls, kept=kept)
            self._kept = kept
        set_random_state(now, self.source.generators)
        self._is_going_on = self.position.calls > 0

    # Calls --------------------------------------------------------------------

    def close(self) -> None:
        """End the processes that load samples; the next pass starts others."""
        self._loader.close()

    def example(self) -> Batch:
        """A batch that looks like that of a call."""
        whole = self._division.rows_of_all
        return self._completed(self.source.example(self._rows), self._rows, whole)

    def begin_next_pass(self) -> None:
        """Move to the beginning of the next pass if all of this one was given out."""
        if self._is_exhausted:
            self._is_exhausted = False
            self.position = Position(self.position.number + 1)

    def __iter__(self) -> Iterator[Call]:
        """The calls of one pass, from the current position on."""
        self.begin_next_pass()
        is_going_on, self._is_going_on = self._is_going_on, False
        # Coming to the position draws numbers that the interrupted run has drawn.
        now = random_state(self.source.generators) if is_going_on else None
        kept, self._kept = self._kept, None
        num_samples = 0
        if not isinstance(self.source, StreamSource):
            batches = self._indexed()
        elif self._processes.are_several:
            num_samples = self.position.calls * self._division.rows_of_all
            batches = self._shared(self.source, kept)
        else:
            batches = self._streamed(self.source)
            if kept is not None:
                num_samples = kept.num_drawn - kept.num_left
            skipped = self.position.calls if kept is None else 0
            for _, num_real, *_ in itertools.islice(batches, skipped):
                num_samples += num_real
        if now is not None:
            set_random_state(now, self.source.generators)
        in_updates = None
        for batch, num_real, num_all, in_updates in batches:
            num_samples += num_all
            if num_all < self._division.rows_of_all and not self._is_padding:
                break  # what is left at the end
            self.source.check(batch, self._sample_of)
            self.position = self.position._replace(calls=self.position.calls + 1)
            batch = pad(batch, self._rows)
            batch = self._completed(batch, num_real, num_all, in_updates)
            yield Call(batch, num_real, num_all)
        if isinstance(self.source, StreamSource):
            self._count(num_samples, in_updates)
        self._is_exhausted = True

    def _begun_pass(self, source: StreamSource) -> Iterator[Block]:
        blocks = source.blocks()
        self._pass = blocks if isinstance(blocks, Pass) else None
        return blocks

    def _streamed(self, source: StreamSource) -> Iterator[_Rows]:
        """Batches of one process, from the beginning of the pass."""
        blocks = self._begun_pass(source)
        return ((batch, n, n, None) for batch, n in rebatched(blocks, self._rows))

    def _shared(
        self, source: StreamSource, kept: LoaderState | None
    ) -> Iterator[_Rows]:
        """Batches of one of several processes, from the position on."""
        parts = shared(
            source,
            self._begun_pass(source),
            self._division,
            self._processes,
            self._division.num_in_blocks,
            skipped=self.position.calls if kept is None else 0,
            last=() if kept is None else [leaf[-1:] for leaf in kept.rows],
        )
        return (
            (part.batch, part.num_real, int(part.num_of_all.sum()), part.num_of_all)
            for part in parts
        )

    def _indexed(self) -> Iterator[_Rows]:
        """Batches of samples that are taken by index, from the position on."""
        done = self.position.calls
        if done and done == self.num_calls:
            return iter(())  # PopTorch's asynchronous loader refuses to load nothing
        batches = self._loader.batches(lambda: self._order(tells_pass=self.is_seeded))
        division, rows = self._division, self._division.rows_of_all
        num_left = range((self.source.num_samples or 0) - done * rows, 0, -rows)
        counts = (min(left, rows) for left in num_left)
        return (
            (batch, division.num_own(count), count, None)
            for batch, count in zip(batches, counts)
        )

    def _order(self, *, tells_pass: bool = False) -> Order:
        """The order of samples that are taken by index, from the position on."""
        count = self.source.num_samples or 0
        rows = self._division.rows_of_all
        is_divided = self._processes.are_several
        is_whole = self._is_padding or is_divided
        return Order(
            count,
            (self.num_calls or 0) * rows if is_whole else count,
            self.seed if self._shuffle else None,
            self.position,
            rows,
            tells_pass=tells_pass,
            division=self._division if is_divided else None,
        )

    def _sample_of(self, row: int) -> int:
        """The index of the sample in a row of the next call."""
        if isinstance(self.source, StreamSource):
            return self.position.calls * self._rows + row
        return int(self._order().indices()[row])

    def _completed(
        self,
        batch: Batch,
        num_real: int,
        num_all: int,
        in_updates: Tensor | None = None,
    ) -> Batch:
        """The batch with class weights, shares and coefficients of rows appended.

        Args:
            num_real: Number of its real rows.
            num_all: Number of real rows of all processes in the call.
            in_updates: Number of those in each update; None if they come first.
        """
        if self._class_weights is not None:
            batch.append(self._class_weights.of(batch))
        if self._is_padding:
            division = self._division
            if in_updates is None and division.count > 1:
                in_updates = division.num_in_updates(num_all)
            batch.append(
                shares(num_real, self._rows, division.block, in_updates, division.count)
            )
        if self._mixed_rows is not None:
            batch.append(self._mixed_rows.of(batch, self.seed, self.position))
        return batch
