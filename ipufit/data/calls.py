# SPDX-License-Identifier: Apache-2.0
"""Divide a source of samples into the data of training and inference calls."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.distributed import Processes
from ipufit.errors import ConfigError, DataError
from ipufit.mixing import Mixing

from .columns import TrainingColumns
from .datasets import ALONE, Source
from .indexed import Division, IndexLoader, Order
from .place import Place, Position, StreamState
from .random_state import random_state, set_random_state
from .streams import Pass, StreamSource

Rows = Tuple[List[Tensor], Tuple[int, ...]]
"""This process's rows of a call, and the number of samples of each process in it."""


class Call(NamedTuple):
    """The data of one call, and the number of its rows that aren't padding.

    Attributes:
        batch: The tensors of a `SampleStructure`, in order: the rows of this process.
        num_real: Number of rows that are samples; padding comes after them.
        num_real_of_each: Number of samples in this call by process.
        num_masked: Number of samples of all processes in this training call, if its
            rows are whole micro-batches; else None.
    """

    batch: list[Tensor]
    num_real: int
    num_real_of_each: tuple[int, ...]
    num_masked: int | None = None

    @property
    def num_real_of_all(self) -> int:
        """Number of rows of all processes in this call that aren't padding."""
        return sum(self.num_real_of_each)

    @property
    def num_samples_of_all(self) -> int:
        """Number of samples of all processes in this training call."""
        return self.num_real_of_all if self.num_masked is None else self.num_masked


def pad(batch: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Repeat the last row of a batch up to `rows`.

    Example:
        >>> pad([torch.tensor([1, 2])], 4)
        [tensor([1, 2, 2, 2])]
    """
    missing = rows - len(batch[0])
    if not missing:
        return list(batch)
    return [torch.cat([t, t[-1:].expand(missing, *t.shape[1:])]) for t in batch]


def rebatched(
    blocks: Iterable[list[Tensor]], rows: int, most: int | None = None
) -> Iterator[tuple[list[Tensor], int]]:
    """Cut and join blocks of any number of rows into batches of `rows`.

    Rows that wait for the next block are copied, because an asynchronous loader uses
    its memory again.

    Args:
        blocks: Blocks of the same structure.
        rows: Number of rows of a batch.
        most: Number of rows after which to stop, without drawing another block; None
            for all.

    Yields:
        A batch and its number of rows, which is less than `rows` only at the end.

    Example:
        >>> blocks = [[torch.tensor([1, 2])], [torch.tensor([3])]]
        >>> [batch[0].tolist() for batch, _ in rebatched(blocks, 2)]
        [[1, 2], [3]]
    """
    kept: list[list[Tensor]] = []
    num_kept = num_seen = 0
    iterator = iter(blocks)
    while num_seen != most:
        block = next(iterator, None)
        if block is None:
            break
        at, size = 0, len(block[0])
        if most is not None:
            size = min(size, most - num_seen)
        num_seen += size
        while size - at >= rows - num_kept:
            end = at + rows - num_kept
            kept.append([leaf[at:end] for leaf in block])
            yield _joined(kept), rows
            kept, num_kept, at = [], 0, end
        if at < size:
            kept.append([leaf[at:size].clone() for leaf in block])
            num_kept += size - at
    if num_kept:
        yield _joined(kept), num_kept


def _joined(parts: Sequence[list[Tensor]]) -> list[Tensor]:
    return parts[0] if len(parts) == 1 else [torch.cat(leaf) for leaf in zip(*parts)]


class _Batches:
    """Base of the classes that divide data into calls.

    Attributes:
        plan_of_samples: The factors of a call, in samples where the source's items are
            whole micro-batches.
        is_seeded: Whether each sample is loaded with its own seed, as in `IndexLoader`.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        options: poptorch.Options,
        num_workers: int,
        loader_mode: str,
        processes: Processes,
    ) -> None:
        self.source = source
        self.structure = source.structure
        self._plan, self._processes = plan, processes
        self.plan_of_samples = source.structure.plan_in_rows(plan)
        self._rows = plan.samples_per_call
        self._division = Division.of(processes, plan)
        self._loader = IndexLoader(
            source.dataset,
            plan,
            options,
            num_workers,
            loader_mode,
            are_several=processes.are_several,
        )
        self.is_seeded = self._loader.is_seeded

    def close(self) -> None:
        """End the loading processes; the next pass starts new ones."""
        self._loader.close()

    def is_real(self, call: Call) -> Tensor | None:
        """Return which rows of a call's outputs are samples; None if all are."""
        structure = self.structure
        if structure.rows is not None:
            (share,) = structure.named(call.batch).share
            mask = share.gt(0)
            mask[call.num_real :] = False
            return mask.flatten()
        if call.num_real == self._rows:
            return None
        return torch.arange(self._rows).lt(call.num_real)

    def _load_by_index(self, order: Order, count: int, seed: int) -> Iterator[Rows]:
        """Begin to load a pass by index, from the start of its order on.

        Args:
            order: Order of the samples.
            count: Number of samples of all processes in the pass.
            seed: Seed of the random numbers that samples draw, if each is seeded.
        """
        unmoved = replace(order)  # a loader moves `order` to the next pass
        return self._checked(self._loader.rows(order, seed), unmoved, count)

    def _checked(
        self, batches: Iterator[list[Tensor]], order: Order, count: int
    ) -> Iterator[Rows]:
        rows = self._division.rows_of_all
        for number, batch in enumerate(batches):
            left = count - (order.start.calls + number) * rows
            first = number * self._rows
            if left <= 0:
                return
            sample_of = partial(_sample_index, order, first)
            self.source.check(batch, sample_of)
            yield batch, self._division.num_of_each(min(left, rows))

    def _split_stream(
        self,
        source: StreamSource,
        blocks: Iterator[list[Tensor]],
        most: int | None = None,
    ) -> Iterator[tuple[list[Tensor], int]]:
        """Cut a pass over a stream into the rows of this process for each call.

        Args:
            source: The stream.
            blocks: The blocks (batches) of the pass.
            most: Number of samples of all processes after which to stop; None for all.
        """
        division, count = self._division, self._processes.count
        if source.divided_loader is not None:
            # Samples to leave out are loaded, too: transforms draw random numbers.
            batches = source.divided_loader.load(
                self._group_indices(source, blocks, most)
            )
            return rebatched(map(source.block_of, batches), self._rows)
        if source.is_part or count == 1:
            if most is not None:  # the first processes take one more if they must
                most = most // count + (division.index < most % count)
            return rebatched(blocks, self._rows, most)
        return (
            (
                [division.select(leaf) for leaf in pad(batch, division.rows_of_all)],
                division.num_of_each(num_real)[division.index],
            )
            for batch, num_real in rebatched(blocks, division.rows_of_all, most)
        )

    def _group_indices(
        self, source: StreamSource, blocks: Iterator[Any], most: int | None
    ) -> Iterator[list[Any]]:
        """Group the indices of this process's samples, from batches of all indices."""
        indices = itertools.islice(itertools.chain.from_iterable(blocks), most)
        own = self._division.select(torch.arange(self._division.rows_of_all)).tolist()
        size = min(self._division.block, source.rows_of_first)
        while True:
            call = list(itertools.islice(indices, self._division.rows_of_all))
            if not call:
                return
            mine = [call[row] for row in own if row < len(call)]
            for at in range(0, len(mine), size):
                yield mine[at : at + size]

    def _calls_of_all(
        self, parts: Iterator[tuple[list[Tensor], int]], last: Sequence[Tensor] = ()
    ) -> Iterator[Rows]:
        """Yield calls until no process has samples left.

        Before each call the processes exchange how many samples they have for it. So
        all make the same number of calls, however uneven the ends of their streams are.
        A process without samples repeats its last row, as padding does.

        Args:
            parts: Rows of this process for each call, and the number of samples in
                them.
            last: The row before the first row of `parts`; empty at the start of a pass.
        """
        are_several = self._processes.are_several
        while True:
            batch, num_real = next(parts, ([], 0))
            each: tuple[int, ...] = (num_real,)
            if are_several:
                counts = torch.zeros(self._processes.count, dtype=torch.int64)
                counts[self._processes.index] = num_real
                each = tuple(self._processes.summed(counts).tolist())
            if not any(each):
                return
            if are_several and batch:
                last = [leaf[-1:].clone() for leaf in batch]  # memory is reused
            yield pad(batch or last or self.source.example(1), self._rows), each


def _sample_index(order: Order, first: int, row: int) -> int:
    """Return the index of the sample in a row of a call that begins at `first`."""
    return int(order.indices()[first + row]) % order.count


class TrainingBatches(_Batches):
    """The calls of each pass over the training data.

    Args:
        plan: The factors of a call.
        options: Options of the training model.
        shuffle: Whether to draw a new order for every pass. Streams keep their order.
        seed: Seed of the orders, of samples that other processes load, and of mixing;
            None draws one from torch's global generator.
        drop_last: True to leave out samples that don't fill a call; `"pad"` to fill
            the call with rows that don't count.
        class_weight: Class index to weight; None if all classes weigh the same.
        has_labels: As for `ClassWeights`.
        mixing: Mixup and CutMix; None without mixing.
        ignored: Indices of targets that losses ignore.
        num_workers: Number of processes that load samples by index.
        loader_mode: `loader_mode` of `IPUConfig`.
        num_passes: Index of the first pass.
        processes: Processes that divide each update. All of them use the order of
            process 0.

    Raises:
        ConfigError: Micro-batches have one sample, and samples are mixed.
        DataError: There are not enough samples for one call, or `class_weight` or
            `mixing` can't be used.

    Attributes:
        structure: Structure of a batch.
        position: Index of the pass, and number of its calls so far.
        seed: Seed of the orders.
        is_seeded: Whether each sample is loaded with its own seed.
        num_calls: Number of calls of a pass; None while unknown.
        num_dropped: Number of samples of all processes that a pass leaves out; None
            while unknown.
        num_empty_updates: Number of updates of the last call that have only padding.
        num_padded: Number of rows of padding in the last call, of all processes.
        ran_out: Whether the last epoch was cut short.
        is_spent: Whether the data is a generator that has ended.
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
        has_labels: bool = False,
        mixing: Mixing | None = None,
        ignored: tuple[int, ...] = (),
        num_workers: int = 0,
        loader_mode: str = "sync",
        num_passes: int = 0,
        processes: Processes = ALONE,
    ) -> None:
        super().__init__(source, plan, options, num_workers, loader_mode, processes)
        self.position = Position(num_passes)
        rows_of_all = self._division.rows_of_all
        is_padding = drop_last in ("pad", False)
        count = source.num_samples
        # The user's loader may return fewer samples than its length says.
        may_be_short = isinstance(source, StreamSource) or (count or 0) % rows_of_all
        self._is_padding = is_padding and bool(may_be_short)
        self._columns = TrainingColumns(
            source,
            plan,
            self._division,
            processes,
            class_weight=class_weight,
            has_labels=has_labels,
            mixing=mixing,
            is_padded=self._is_padding,
        )
        if count is not None and count < rows_of_all and not is_padding:
            raise DataError(
                f"`x` has {count} samples, but one training call takes "
                f"{plan.describe_as_too_large()}"
            )
        self.count(ignored)
        self.num_calls: int | None = None
        self.num_dropped: int | None = 0 if is_padding else None
        self.num_empty_updates = self.num_padded = 0
        if count is not None:
            self._count(count)
        if shuffle or self.is_seeded or mixing is not None:
            if seed is None:
                # Drawn here and not in loading processes, which are copies of this
                # process.
                seed = int(torch.empty((), dtype=torch.int64).random_())
            seed = processes.first(seed)
        self.seed = seed or 0
        self._shuffle = shuffle
        self._pass: Pass | None = None
        self._resumed: StreamState | None = None  # until the resumed pass begins
        self._is_exhausted = False
        self._calls_of_pass: Iterator[Call] | None = None
        self._calls_of_epoch: int | None = None
        self.ran_out = self.is_spent = False

    def count(self, ignored: tuple[int, ...]) -> None:
        """Set the class indices of ignored targets, counted for each update."""
        self._columns.count(ignored)
        self.structure = self._columns.structure

    def _count(
        self, num_samples: int, last_of_each: tuple[int, ...] | None = None
    ) -> None:
        """Set the number of calls of a pass, and of the samples that it leaves out.

        Args:
            num_samples: Number of samples of all processes.
            last_of_each: Samples of each process in the last call; None if the
                updates of a call are filled one after the other.
        """
        rows = self._division.rows_of_all
        self.num_calls = self.position.calls
        if last_of_each is None:
            self.num_calls = -(-num_samples // rows)
            last_of_each = self._division.num_of_each(num_samples % rows or rows)
        if not self._is_padding:
            self.num_calls, self.num_dropped = divmod(num_samples, rows)
            return
        self.num_padded = self.num_calls * rows - num_samples
        in_updates = self._division.num_in_updates(last_of_each)
        self.num_empty_updates = int(in_updates.eq(0).sum())

    # A run that is resumed ----------------------------------------------------

    def state_dict(self) -> Place:
        """Return the place in the data after the last call.

        Raises:
            DataError: The state of the user's loader can't be saved.
        """
        source, stream = self.source, None
        if isinstance(source, StreamSource):
            stream = self._resumed or source.state_dict()
            if self.position.calls and self._pass is not None:
                is_part = source.is_part or not self._processes.are_several
                rows = self._rows if is_part else self._division.rows_of_all
                stream = self._pass.state_dict(self.position.calls * rows)
        now = random_state(source.generators)
        return Place(self.seed, self.position, now, stream)

    def load_state_dict(self, place: Place) -> None:
        """Continue from the place of an interrupted run.

        Earlier samples are not loaded, except from a stream without a state, whose
        batches are drawn and dropped.
        """
        self.seed, self.position, self._pass = place.seed, place.position, None
        source, is_due = self.source, not place.position.calls
        if isinstance(source, StreamSource):
            self._resumed = source.load_state_dict(place.stream, is_due=is_due)
        set_random_state(place.random, source.generators)

    # Epochs -------------------------------------------------------------------

    def set_epochs(self, steps_per_epoch: int | None, num_epochs: int) -> None:
        """Divide the calls into epochs; without `steps_per_epoch` an epoch is a pass.

        Args:
            steps_per_epoch: Updates per epoch; None for whole passes.
            num_epochs: Number of epochs to come.

        Raises:
            ConfigError: `steps_per_epoch` must be a multiple of the updates of a call.
            DataError: A generator would be needed for several passes.
        """
        if steps_per_epoch is not None:
            updates = self._plan.device_iterations
            calls, rest = divmod(steps_per_epoch, updates)
            if rest:
                near = [n * updates for n in (calls, calls + 1) if n]
                raise ConfigError(
                    f"steps_per_epoch={steps_per_epoch} must be a multiple of the "
                    f"{updates} updates that a call makes "
                    f"(device_iterations). The nearest are {near}."
                )
            self._calls_of_epoch = calls
        elif num_epochs > 1 and self.source.is_one_shot:
            raise DataError(
                f"`x` is a generator, which can be gone through once, and epochs ask "
                f"for {num_epochs} passes. Pass steps_per_epoch, or a loader or a "
                "dataset, which can be begun anew."
            )

    @property
    def calls_per_epoch(self) -> int | None:
        """Number of calls per epoch; None if unknown."""
        number = self._calls_of_epoch
        return self.num_calls if number is None else number

    def epoch(self, num_done: int = 0) -> Iterator[Call]:
        """Yield the calls of the next epoch.

        With `steps_per_epoch` an epoch continues where the last one ended, and begins a
        new pass only if the last pass was complete (Keras's rule). An epoch that runs
        out of data in the middle is cut short.

        Args:
            num_done: Number of calls of the epoch that an interrupted run has made.
        """
        self.source.begin_epoch()
        if self._calls_of_epoch is None:
            yield from self
        else:
            self.ran_out = False
            for number in range(num_done, self._calls_of_epoch):
                call = self._next(may_restart=number == 0)
                if call is None:
                    self.ran_out = True
                    break
                yield call
        self.source.end_epoch()

    def _next(self, *, may_restart: bool) -> Call | None:
        """Return the next call; None at the end of the data."""
        if self._calls_of_pass is None:
            self._calls_of_pass = iter(self)
        call = next(self._calls_of_pass, None)
        if call is None:
            self._calls_of_pass = None
            self.is_spent = self.source.is_one_shot
            if may_restart and not self.is_spent:
                return self._next(may_restart=False)
        return call

    # Calls --------------------------------------------------------------------

    def example(self) -> list[Tensor]:
        """Return a batch with the shapes of a call."""
        example = self.source.example(self._rows)
        each = (self._rows,) * self._processes.count
        return self._columns.add(
            example, each, self.seed, self.position, is_example=True
        )[0]

    def begin_next_pass(self) -> None:
        """Move to the next pass if this one has ended."""
        if self._is_exhausted:
            self._is_exhausted = False
            self.position = Position(self.position.number + 1)

    def __iter__(self) -> Iterator[Call]:
        """Yield the calls of one pass, from the current position on."""
        self.begin_next_pass()
        source, index = self.source, self._processes.index
        rows_of_all = self._division.rows_of_all
        # On the way to the position, numbers of the interrupted run are drawn again.
        is_resumed = self.position.calls > 0
        now = random_state(source.generators) if is_resumed else None
        batches: Iterator[Rows] = iter(())
        if isinstance(source, StreamSource):
            batches = self._streamed(source)
        elif not is_resumed or self.position.calls != self.num_calls:
            # PopTorch's asynchronous loader refuses to load nothing.
            batches = self._load_by_index(
                self._order(), source.num_samples or 0, self.seed
            )
        if now is not None:
            set_random_state(now, source.generators)
        num_samples = self.position.calls * rows_of_all
        each = None
        for batch, each in batches:
            num_all = sum(each)
            num_samples += num_all
            if num_all < rows_of_all and not self._is_padding:
                break  # the rest doesn't fill a call
            if isinstance(source, StreamSource):
                source.check(batch, (self.position.calls * self._rows).__add__)
            self.position = self.position._replace(calls=self.position.calls + 1)
            batch, num_masked = self._columns.add(batch, each, self.seed, self.position)
            yield Call(batch, each[index], each, num_masked)
        if isinstance(source, StreamSource):
            self._count(num_samples, each)
        self._is_exhausted = True

    def _streamed(self, source: StreamSource) -> Iterator[Rows]:
        """Cut a stream into calls, from the position on."""
        self._pass, self._resumed = source.blocks(self._resumed), None
        last: Sequence[Tensor] = [leaf[-1:] for leaf in self._pass.last]
        parts = self._split_stream(source, self._pass)
        num_skipped = 0 if self._pass.skips else self.position.calls
        for batch, _ in itertools.islice(parts, num_skipped):
            last = [leaf[-1:].clone() for leaf in batch]
        return self._calls_of_all(parts, last)

    def _order(self) -> Order:
        """Return the order of samples that are taken by index, from the position on."""
        count = self.source.num_samples or 0
        is_whole = self._is_padding or self._processes.are_several
        return Order(
            count,
            (self.num_calls or 0) * self._division.rows_of_all if is_whole else count,
            self.seed if self._shuffle else None,
            self._division,
            self.position,
            tells_pass=self.is_seeded,
        )


class InferenceBatches(_Batches):
    """The calls of inference: every sample once, in order.

    Args:
        plan: The factors of a call.
        options: Options of the inference model.
        max_rows: Number of samples after which to stop; None for all samples.
        num_workers: Number of processes that load samples by index.
        loader_mode: `loader_mode` of `IPUConfig`.
        seed: Seed of samples that an asynchronous loader loads: the same in every pass.
        processes: Processes that divide the samples.

    Attributes:
        structure: Structure of a batch.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        options: poptorch.Options,
        *,
        max_rows: int | None = None,
        num_workers: int = 0,
        loader_mode: str = "sync",
        seed: int | None = None,
        processes: Processes = ALONE,
    ) -> None:
        super().__init__(source, plan, options, num_workers, loader_mode, processes)
        self._draws_anew = self.is_seeded and loader_mode == "sync"
        self._max_rows = max_rows
        self._seed = seed or 0
        self._ongoing: Iterator[list[Tensor]] | None = None

    @property
    def num_samples(self) -> int | None:
        """Number of samples of all processes; None if unknown."""
        count, most = self.source.num_samples, self._max_rows
        return count if count is None or most is None else min(count, most)

    @property
    def num_calls(self) -> int | None:
        """Number of calls, equal in all processes; None if unknown."""
        count = self.num_samples
        return None if count is None else -(-count // self._division.rows_of_all)

    @property
    def passes_per_call(self) -> int:
        """Number of forward passes over all replicas in a call, which hooks count."""
        return self._plan.device_iterations

    def num_passes(self, num_rows: int) -> int:
        """Return how many forward passes, each on all replicas, samples take.

        Args:
            num_rows: Number of samples of all processes. No process has more of them
                in a call than process 0.
        """
        of_first = self._division.num_of_each(num_rows)[0]
        return -(-of_first // self._plan.samples_per_update)

    def left_over(self, num_rows: int | Sequence[int]) -> list[int]:
        """Return, of all processes, the numbers of rows that don't fill a micro-batch.

        Args:
            num_rows: Number of samples of all processes, or a number for each process.
        """
        size = self._plan.micro_batch_size
        if isinstance(num_rows, int):
            num_rows = self._division.num_of_each(num_rows)
        return sorted({number % size for number in num_rows} - {0})

    def example(self, *, inputs_only: bool = True) -> list[Tensor]:
        """Return tensors with the shapes of a call."""
        return self.source.example(self._rows, inputs_only=inputs_only)

    def __iter__(self) -> Iterator[Call]:
        """Yield the calls; padding follows the real rows and repeats the last one."""
        source, index = self.source, self._processes.index
        source.begin_epoch()
        rows = self._streamed(source) if isinstance(source, StreamSource) else None
        is_empty = True
        for batch, each in self._load_all_by_index() if rows is None else rows:
            is_empty = False
            yield Call(batch, each[index], each)
        if is_empty:
            raise DataError(
                "There are no more samples: a generator can be gone through once. Pass "
                "a loader or a dataset, which can be begun anew."
            )
        source.end_epoch()

    def _load_all_by_index(self) -> Iterator[Rows]:
        """Load samples that are taken by index."""
        count, rows = self.num_samples or 0, self._division.rows_of_all
        seed = self._seed
        if self._draws_anew:  # in each pass, as without processes that load
            seed = int(torch.empty((), dtype=torch.int64).random_())
            seed = self._processes.first(seed)
        order = Order(count, -(-count // rows) * rows, None, self._division)
        return self._load_by_index(order, count, seed)

    def _streamed(self, source: StreamSource) -> Iterator[Rows]:
        """Cut a stream into calls."""
        blocks: Iterator[list[Tensor]] | None = self._ongoing
        if blocks is None:
            blocks = source.blocks()
            if self._max_rows is not None and source.is_one_shot:
                self._ongoing = blocks  # the next iteration goes on with a generator
        done = 0
        for batch, each in self._calls_of_all(
            self._split_stream(source, blocks, self._max_rows)
        ):
            source.check(batch, done.__add__)
            done += sum(each)
            yield batch, each
