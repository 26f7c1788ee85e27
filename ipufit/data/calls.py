# SPDX-License-Identifier: Apache-2.0
"""The data of training and inference calls."""

from __future__ import annotations

import contextlib
import functools
import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import (
    Any,
    Callable,
    Iterable,
    Iterator,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan, check_positive
from ipufit.distributed import Processes
from ipufit.errors import ConfigError, DataError
from ipufit.mixing import Mixing
from ipufit.types import Batch

from .datasets import ArrayDataset, SeededRows, StackedRows
from .mixing import ClassWeights, MixedRows
from .order import BEGINNING, Division, InOrder, Order, Position
from .random_state import HostRandomState, RandomState, random_state, set_random_state
from .streams import ALONE, Block, LoaderState, Pass, Replay, Source, StreamSource
from .workers import Carrier, ErrorReport, ReportedRows


def shares(
    num_real: int,
    rows: int,
    rows_per_update: int,
    num_of_all: Tensor | None = None,
    num_processes: int = 1,
) -> Tensor:
    """How much each row of a call counts in the loss of its update.

    Args:
        num_real: Number of real rows; they come before the padding.
        rows: Number of rows of the call.
        rows_per_update: Number of rows of one update; divides `rows`.
        num_of_all: Number of real rows of all processes in each update; None if there
            is one process.
        num_processes: Number of processes, which have as many rows each.

    Returns:
        `[rows]`, float32: 0 for padding. The real rows of an update add up to the
        number of its rows, over all processes, so that the mean over all rows is the
        mean over real rows.

    Example:
        >>> shares(3, rows=6, rows_per_update=2)
        tensor([1., 1., 2., 0., 0., 0.])
        >>> shares(1, 2, 2, num_of_all=torch.tensor([3]), num_processes=2)
        tensor([1.3333, 0.0000])
    """
    is_real = torch.arange(rows).lt(num_real).to(torch.float32)
    per_update = is_real.reshape(-1, rows_per_update)
    if num_of_all is None:
        num_of_all = per_update.sum(dim=1)
    counts = num_of_all.unsqueeze(1).clamp(min=1)
    return torch.flatten(per_update * (rows_per_update * num_processes / counts))


def pad(batch: Sequence[Tensor], rows: int) -> Batch:
    """The batch with its last row repeated up to `rows`.

    Example:
        >>> pad([torch.tensor([1, 2])], 4)
        [tensor([1, 2, 2, 2])]
    """
    missing = rows - len(batch[0])
    if not missing:
        return list(batch)
    return [torch.cat([t, t[-1:].expand(missing, *t.shape[1:])]) for t in batch]


def rebatched(blocks: Iterable[Block], rows: int) -> Iterator[tuple[Batch, int]]:
    """Cuts and joins blocks of any number of rows into batches of `rows`.

    Rows that wait for the next block are copied, because an asynchronous loader uses
    its memory again.

    Args:
        blocks: Blocks of the same structure.
        rows: Number of rows of a batch.

    Yields:
        A batch and its number of rows, which is less than `rows` only at the end.

    Example:
        >>> blocks = [[torch.tensor([1, 2])], [torch.tensor([3])]]
        >>> [batch[0].tolist() for batch, _ in rebatched(blocks, 2)]
        [[1, 2], [3]]
    """
    kept: list[Block] = []
    num_kept = 0
    for block in blocks:
        at, size = 0, len(block[0])
        while size - at >= rows - num_kept:
            end = at + rows - num_kept
            kept.append([leaf[at:end] for leaf in block])
            yield _joined(kept), rows
            kept, num_kept, at = [], 0, end
        if at < size:
            kept.append([leaf[at:].clone() for leaf in block])
            num_kept += size - at
    if num_kept:
        yield _joined(kept), num_kept


def _joined(parts: Sequence[Block]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return [torch.cat(leaves) for leaves in zip(*parts)]


def first_rows(blocks: Iterator[Block], most: int | None) -> Iterator[Block]:
    """The blocks up to `most` rows in all; every block if `most` is None."""
    if most is None:
        yield from blocks
        return
    if not most:
        return  # a generator would lose what is drawn of it
    for block in blocks:
        yield [leaf[:most] for leaf in block]
        most -= min(most, len(block[0]))
        if not most:
            return


def collate(samples: Any) -> Batch:
    """Stack flat samples into the tensors of a call.

    Raises:
        DataError: The samples have different shapes.

    Example:
        >>> [t.shape for t in collate([(torch.zeros(3), 1), (torch.zeros(3), 0)])]
        [torch.Size([2, 3]), torch.Size([2])]
    """
    if isinstance(samples, StackedRows):
        return list(samples)
    try:
        return list(default_collate(samples))
    except RuntimeError as error:
        raise DataError(
            "Samples of different shapes can't share a call, because the shapes of a "
            f"compiled model are fixed: {error}. Pad or crop them to one shape."
        ) from error


@dataclass(frozen=True, eq=False)
class GatheredCalls:
    """The whole calls of each pass over tensors, with copies of their rows.

    A loader would take the order apart into single indices and put them together again
    for each batch, which takes most of the time of a small call.

    Args:
        dataset: Samples in memory.
        order: Order of the samples; gives new indices, or keys, for each pass.
        rows: Number of rows of a call.

    Example:
        >>> import torch
        >>> calls = GatheredCalls(ArrayDataset([torch.arange(5)]), Order(5, 5), 2)
        >>> [call[0].tolist() for call in calls]
        [[0, 1], [2, 3]]
    """

    dataset: ArrayDataset
    order: Order | InOrder
    rows: int

    def __iter__(self) -> Iterator[Batch]:
        indices = self.order.indices()
        if self.dataset.rows is not None:  # keys have the number of the pass in them
            indices = indices.remainder(len(self.dataset))
        for first in range(0, len(indices) - self.rows + 1, self.rows):
            part = indices[first : first + self.rows]
            yield self.dataset.gathered(part)

    def terminate(self) -> None:
        """Do nothing: unlike a loader, this has no processes to end."""


Part = Tuple[Batch, int]
"""Rows of one process, padded to a call or not, and how many of them are samples."""


class Shared(NamedTuple):
    """The rows of a call that one process has.

    Attributes:
        batch: Rows of a call, padded.
        num_real: Number of its rows that are samples; they come first.
        num_of_all: Sums over all processes of what was counted.
    """

    batch: Batch
    num_real: int
    num_of_all: Tensor


def shared(
    source: StreamSource,
    blocks: Iterator[Block],
    division: Division,
    processes: Processes,
    count: Callable[[int], Tensor],
    *,
    skipped: int = 0,
    max_rows: int | None = None,
    last: Sequence[Tensor] = (),
) -> Iterator[Shared]:
    """The calls of a pass over a stream, up to the one for which nobody has samples.

    Args:
        source: The stream.
        blocks: Its pass.
        division: The rows of each process.
        processes: All processes.
        count: Makes of the number of samples that this process has for a call what is
            to be added up over all processes.
        skipped: Number of calls to leave out at the beginning.
        max_rows: Number of samples of all processes after which to stop; None for all.
        last: The row before, of which nothing is left; empty at the beginning.
    """
    parts = endless(_parts(source, blocks, division, max_rows), source, last)
    for _ in itertools.islice(parts, skipped):  # now, not when the first call is asked
        pass
    return agreed(parts, division, processes, count)


def endless(
    parts: Iterator[Part], source: StreamSource, last: Sequence[Tensor] = ()
) -> Iterator[Part]:
    """The rows of this process for each call, then calls of one row that is no sample.

    It repeats the last row, as padding does, so that a resumed run has the same one.

    Args:
        parts: Rows of this process for each call.
        source: The stream, whose first sample is the row if `parts` is empty.
        last: The row before those of `parts`; empty if there is none.
    """
    for batch, num_real in parts:
        last = [leaf[-1:].clone() for leaf in batch]  # loaders use memory again
        yield batch, num_real
    while True:
        yield list(last or source.example(1)), 0


def agreed(
    parts: Iterator[Part],
    division: Division,
    processes: Processes,
    count: Callable[[int], Tensor],
) -> Iterator[Shared]:
    """Calls of what each process has, up to the one for which nobody has samples.

    Args:
        parts: Rows of this process for each call, from `endless`.
        division: As for `shared`.
        processes: As for `shared`.
        count: As for `shared`.
    """
    for batch, num_real in parts:
        num_of_all = processes.summed(count(num_real))
        if not num_of_all.any():
            return
        yield Shared(pad(batch, division.rows), num_real, num_of_all)


def _parts(
    source: StreamSource,
    blocks: Iterator[Block],
    division: Division,
    most: int | None,
) -> Iterator[Part]:
    """Rows of this process for each call."""
    if source.own_loading is not None:
        # Samples to leave out are loaded, too: transforms draw random numbers.
        own = _loaded(source, blocks, division, most)
        return rebatched(own, division.rows)
    if source.is_own_part:
        own_most = None if most is None else division.num_of_part(most)
        return rebatched(first_rows(blocks, own_most), division.rows)
    whole = rebatched(first_rows(blocks, most), division.rows_of_all)
    return (_cut(batch, count, division) for batch, count in whole)


def _cut(batch: Batch, count: int, division: Division) -> tuple[Batch, int]:
    """The rows of this process, of a batch for all that may lack some at the end."""
    whole = pad(batch, division.rows_of_all)
    return [division.own(leaf) for leaf in whole], division.num_own(count)


def _loaded(
    source: StreamSource,
    batches_of_indices: Iterator[Block],
    division: Division,
    most: int | None,
) -> Iterator[Block]:
    """The samples of this process, loaded by index."""
    loading: Any = source.own_loading
    indices = itertools.islice(itertools.chain.from_iterable(batches_of_indices), most)
    rows = division.rows_of_all
    own = division.own(torch.arange(rows)).tolist()
    size = min(division.block, source.rows_of_first)

    def groups() -> Iterator[list[object]]:
        while True:
            call = list(itertools.islice(indices, rows))
            if not call:
                return
            mine = [call[row] for row in own if row < len(call)]
            for at in range(0, len(mine), size):
                yield mine[at : at + size]

    return (source.block_of(batch) for batch in loading.load(groups()))


class Call(NamedTuple):
    """The data of one call, and how much of it is samples.

    Attributes:
        batch: The tensors of a `SampleStructure`, in order: the rows of this process.
        num_real: Number of rows that are samples; they come before the padding.
        num_real_of_all: Number of samples of all processes in this call. It is 0 in
            calls for single rows only.
        num_real_of_each: Number of samples of each process in this call, in their
            order. Inference only; empty in training.
        num_singles: Number of rows that come once more, each in a micro-batch of its
            own; these come before the padding.
    """

    batch: Batch
    num_real: int
    num_real_of_all: int
    num_real_of_each: tuple[int, ...] = ()
    num_singles: int = 0


class Loading(NamedTuple):
    """How map-style data is loaded.

    Attributes:
        num_workers: Number of processes that load; 0 to load in this one.
        mode: `loader_mode` of `IPUConfig`.
    """

    num_workers: int = 0
    mode: str = "sync"

    @property
    def is_elsewhere(self) -> bool:
        """Whether other processes load the samples."""
        return self.num_workers > 0 or self.mode != "sync"

    def seeds(self, dataset: Any, processes: Processes) -> bool:
        """Whether each sample is loaded with random numbers of its own.

        That is so where other processes load, and where several train: a sample is the
        same whichever of them has it. Samples in memory draw nothing. (A subset of
        them has such numbers, too, so that runs are those in which it was loaded.)

        Args:
            dataset: Map-style dataset; None for a stream.
            processes: Processes that divide the samples.
        """
        is_drawing = dataset is not None and not _is_whole_array(dataset)
        return is_drawing and (self.is_elsewhere or processes.are_several)


def _is_whole_array(dataset: Any) -> bool:
    return isinstance(dataset, ArrayDataset) and dataset.rows is None


PLAIN = Loading()

_PREFETCHED = 2
"""Calls that each process loads ahead: torch's default."""

_MODES = {
    "sync": poptorch.DataLoaderMode.Sync,
    "async": poptorch.DataLoaderMode.Async,
    "async_rebatched": poptorch.DataLoaderMode.AsyncRebatched,
}


@dataclass(eq=False)
class CallLoader:
    """Loads whole calls of a map-style dataset.

    Args:
        dataset: Items are flat tuples of tensors; None for a stream.
        plan: The factors of a call.
        options: Options of the model.
        loading: Which processes load, and how.
        seed: Seed of which each sample gets random numbers of its own; None to have
            all draw from the generators of this process.
    """

    dataset: Any
    plan: BatchPlan
    options: poptorch.Options
    loading: Loading
    seed: int | None
    _loader: Any = field(default=None, init=False)
    _report: ErrorReport = field(default_factory=ErrorReport, init=False)

    def batches(self, order: Callable[[], Order | InOrder]) -> Iterator[Batch]:
        """Begin a pass: make the iterator now, which draws from torch's generator.

        Args:
            order: Makes the order of this pass and those that follow; called when the
                processes that load are started.

        Returns:
            The batches of calls, as lists of tensors.

        Raises:
            DataError: The process that loads has failed.
        """
        with self._loading_errors():
            if self._loader is None:
                self._loader = self._new_loader(order())
            is_gathered = type(self._loader) is GatheredCalls
            if is_gathered and not _is_whole_array(self.dataset):
                # Runs on subsets were those of a loader, which draws a seed each pass.
                iter(DataLoader([0]))  # type: ignore[arg-type]
            return self._each(iter(self._loader))

    def _each(self, iterator: Iterator[Any]) -> Iterator[Batch]:
        with self._loading_errors():
            batch = self._next(iterator)
            while batch is not None:  # `for` calls iter(), and PopTorch's begins anew
                yield list(batch)
                batch = self._next(iterator)

    def _next(self, iterator: Iterator[Any]) -> Any:
        """The next batch; None at the end."""
        is_array = isinstance(self.dataset, ArrayDataset)
        if self.seed is None or self.loading.is_elsewhere or is_array:
            return next(iterator, None)
        before = HostRandomState()  # samples that are loaded here seed its generators
        try:
            return next(iterator, None)
        finally:
            before.put_back()

    def close(self) -> None:
        """End the processes that load; the next pass starts others."""
        self._report.take()  # deletes its file
        loader, self._loader = self._loader, None
        if loader is None:
            return
        loader.terminate()
        # Workers outlive an epoch, and torch has no public way to end them while
        # something refers to their iterator, such as the traceback of an error.
        workers = getattr(loader, "_iterator", None)
        if workers is not None:
            workers._shutdown_workers()

    @contextlib.contextmanager
    def _loading_errors(self) -> Iterator[None]:
        try:
            yield
        except (AssertionError, poptorch.Error) as error:
            if "data fetcher" not in str(error) and "worker" not in str(error):
                raise
            raise DataError(
                f"Samples could not be loaded. {error}\n{self._report.take()}".rstrip()
            ) from error

    def _new_loader(self, order: Order | InOrder) -> Any:
        dataset, plan, loading = self.dataset, self.plan, self.loading
        if isinstance(dataset, ArrayDataset) and not loading.is_elsewhere:
            return GatheredCalls(dataset, order, plan.samples_per_call)
        if self.seed is not None:
            dataset = SeededRows(dataset, self.seed)
        collating: Any = collate
        if loading.mode != "sync":
            dataset = ReportedRows(dataset, self._report)
            collating = functools.partial(self._report.calling, collate)
        ahead: dict[str, Any] = {}
        if loading.num_workers:
            collating = Carrier(collating, _PREFETCHED + 1)
            ahead["prefetch_factor"] = _PREFETCHED
        # Starting processes draws a seed for them from the generator. A resumed run
        # starts them once more than others do, which must not change torch's own.
        starts_here = loading.num_workers > 0 and loading.mode == "sync"
        mode = loading.mode
        if mode == "async_rebatched" and plan.samples_per_call == 1:
            mode = "async"  # PopTorch refuses to rebatch calls of one row
        return poptorch.DataLoader(
            self.options,
            dataset,
            batch_size=plan.micro_batch_size,
            num_workers=loading.num_workers,
            drop_last=True,
            auto_distributed_partitioning=False,  # the order is divided already
            mode=_MODES[mode],
            collate_fn=collating,
            sampler=order,
            generator=torch.Generator() if starts_here else None,
            **ahead,
        )


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


class InferenceBatches:
    """The calls that cover every sample once, in order.

    Args:
        plan: The factors of a call.
        options: Options of the inference model.
        max_rows: Number of samples after which to stop; None for all samples.
        loading: How map-style data is loaded.
        seed: Seed of samples that other processes load: the same in every pass.
        processes: Processes that divide the samples.

    Attributes:
        structure: How the tensors of a batch nest.
        has_singles: Whether the rows of a micro-batch that is filled only in part come
            once more, each in a micro-batch of its own. With these a figure that is a
            mean over rows can be computed for each of them.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        options: poptorch.Options,
        *,
        max_rows: int | None = None,
        loading: Loading = PLAIN,
        seed: int | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.source = source
        self.structure = source.structure
        self.has_singles = False
        self._plan = plan
        self._rows = plan.samples_per_call
        self._processes = processes
        self._division = Division.of(processes, plan)
        self._max_rows = max_rows
        own = (seed or 0) if loading.seeds(source.dataset, processes) else None
        self._loader = CallLoader(source.dataset, plan, options, loading, own)
        self._ongoing: Iterator[Block] | None = None

    @property
    def num_samples(self) -> int | None:
        """Number of samples of all processes to go through; None if unknown."""
        count, most = self.source.num_samples, self._max_rows
        return count if count is None or most is None else min(count, most)

    @property
    def num_calls(self) -> int | None:
        """Number of calls, the same in all processes; None if unknown."""
        count = self.num_samples
        if count is None:
            return None
        single_rows = self._num_singles(count) * self._plan.micro_batch_size
        rows = self._division.rows_of_all
        return -(-count // rows) - (-single_rows // rows)

    def _num_singles(self, count: int) -> int:
        """Number of samples that come once more, each in its own micro-batch."""
        return count % self._plan.micro_batch_size if self.has_singles else 0

    @property
    def passes_per_call(self) -> int:
        """Forward passes over all replicas in a call, which hooks count."""
        return self._plan.device_iterations

    def num_passes(self, num_rows: int) -> int:
        """Forward passes over all replicas that samples take.

        Args:
            num_rows: Number of samples of all processes. The first one has as many of
                them in each call as any.
        """
        return -(-self._division.num_own(num_rows, 0) // self._plan.samples_per_update)

    def close(self) -> None:
        """End the processes that load samples; the next pass starts others."""
        self._loader.close()

    def example(self, *, inputs_only: bool = True) -> Batch:
        """Tensors that look like those of a call."""
        return self.source.example(self._rows, inputs_only=inputs_only)

    def __iter__(self) -> Iterator[Call]:
        """The calls; padding follows the real rows and repeats the last one.

        Calls for single rows have no real rows.
        """
        if isinstance(self.source, StreamSource):
            is_shared = self._processes.are_several
            streamed = self._shared if is_shared else self._streamed
            yield from streamed(self.source)
            return
        count = self.num_samples or 0
        division, size = self._division, self._plan.micro_batch_size
        rows = division.rows_of_all
        single_rows = self._num_singles(count) * size
        # Samples first, then single rows, in calls of their own.
        for batch, done in zip(
            self._loader.batches(lambda: self._order(count)),
            range(0, self._whole(count) + self._whole(single_rows), rows),
        ):
            self.source.check(batch, partial(_sample_of, division, done))
            num_all = min(max(count - done, 0), rows)
            left = single_rows - (done - self._whole(count))
            num_singles = 0 if num_all else division.num_own(min(left, rows)) // size
            each = division.num_of_each(num_all)
            yield Call(batch, each[division.index], num_all, each, num_singles)

    def _whole(self, num_rows: int) -> int:
        """Rows of whole calls that hold `num_rows`."""
        return num_rows + -num_rows % self._division.rows_of_all

    def _order(self, count: int) -> InOrder:
        size, division = self._plan.micro_batch_size, self._division
        singles = range(count - self._num_singles(count), count)
        further = [row for row in singles for _ in range(size)]
        return InOrder(count, division.rows_of_all, further, division)

    def _streamed(self, source: StreamSource) -> Iterator[Call]:
        batch: Batch = []
        done = 0
        for batch, num_real in rebatched(self._blocks(source), self._rows):
            source.check(batch, done.__add__)
            done += num_real
            yield Call(pad(batch, self._rows), num_real, num_real, (num_real,))
        if not done:
            raise _spent()
        for singles, num_rows in self._single_rows(batch, len(batch[0])):
            num_singles = num_rows // self._plan.micro_batch_size
            yield Call(pad(singles, self._rows), 0, 0, (0,), num_singles)

    def _shared(self, source: StreamSource) -> Iterator[Call]:
        division, processes = self._division, self._processes
        last: Batch = []
        last_real = done = 0
        for batch, num_real, num_of_each in shared(
            source,
            self._blocks(source, first=False),
            division,
            processes,
            self._as_of_this_process,
            max_rows=self._max_rows,
        ):
            source.check(batch, done.__add__)
            each = tuple(num_of_each.tolist())
            done += sum(each)
            if num_real:  # this process's part may have ended before those of others
                last, last_real = batch, num_real
            yield Call(batch, num_real, sum(each), each)
        if not done:
            raise _spent()
        if not self.has_singles:
            return
        singles = endless(self._single_rows(last, last_real), source)
        count = self._as_of_this_process
        for batch, num_rows, _ in agreed(singles, division, processes, count):
            num_singles = num_rows // self._plan.micro_batch_size
            yield Call(batch, 0, 0, (0,) * processes.count, num_singles)

    def _as_of_this_process(self, count: int) -> Tensor:
        """A number of this process in the place that it has among all."""
        counts = torch.zeros(self._processes.count, dtype=torch.int64)
        counts[self._processes.index] = count
        return counts

    def _single_rows(self, batch: Batch, num_real: int) -> Iterator[tuple[Batch, int]]:
        """The rows of the last, incomplete micro-batch, each in one of its own."""
        num_singles = self._num_singles(num_real)
        size = self._plan.micro_batch_size
        if not num_singles:
            return iter(())
        rows = slice(num_real - num_singles, num_real)
        block = [leaf[rows].repeat_interleave(size, dim=0) for leaf in batch]
        return rebatched([block], self._rows)

    def _blocks(self, source: StreamSource, *, first: bool = True) -> Iterator[Block]:
        """The blocks to go through: the first ones; of a generator the next ones.

        Args:
            first: Whether to cut them after `max_rows`.
        """
        if self._max_rows is None:
            return source.blocks()
        if source.is_one_shot and self._ongoing is None:
            self._ongoing = source.blocks()
        blocks = self._ongoing or source.blocks()
        return first_rows(blocks, self._max_rows) if first else blocks


def _sample_of(division: Division, done: int, row: int) -> int:
    """The index of a sample in the data.

    Args:
        division: The rows of this process.
        done: Number of samples of all processes before this call.
        row: Row of the call in this process.
    """
    return done + division.place_of(row)


def _spent() -> DataError:
    return DataError(
        "There are no more samples: a generator can be gone through once. Pass a "
        "loader or a dataset, which can be begun anew."
    )


class Epochs:
    """Cuts training calls into epochs.

    Without `steps_per_epoch` an epoch is one pass. With it, an epoch goes on where the
    last one ended, and begins a new pass only if the last pass was complete (Keras's
    rule). An epoch that runs out of data in the middle is cut short.

    Args:
        batches: The calls of a pass.
        plan: The factors of a call.
        steps_per_epoch: Updates per epoch; None for whole passes.
        num_epochs: Number of epochs to come.
        calls_done: Calls of the first epoch that an interrupted run has made.

    Raises:
        ConfigError: `steps_per_epoch` is no multiple of the updates of a call.
        DataError: A generator would have to give several passes.

    Attributes:
        ran_out: Whether the last epoch was cut short.
        is_spent: Whether the data is a generator that has ended.
    """

    def __init__(
        self,
        batches: TrainingBatches,
        plan: BatchPlan,
        steps_per_epoch: int | None,
        num_epochs: int,
        calls_done: int = 0,
    ) -> None:
        self._batches = batches
        self._iterator: Iterator[Call] | None = None
        self._calls: int | None = None
        self._calls_done = calls_done
        self.ran_out = self.is_spent = False
        if steps_per_epoch is not None:
            check_positive("steps_per_epoch", steps_per_epoch)
            calls, rest = divmod(steps_per_epoch, plan.device_iterations)
            if rest:
                near = [n * plan.device_iterations for n in (calls, calls + 1) if n]
                raise ConfigError(
                    f"steps_per_epoch={steps_per_epoch} is no multiple of the "
                    f"{plan.device_iterations} updates that a call makes "
                    f"(device_iterations). The nearest are {near}."
                )
            self._calls = calls
        elif num_epochs > 1 and batches.source.is_one_shot:
            raise DataError(
                f"`x` is a generator, which can be gone through once, and epochs ask "
                f"for {num_epochs} passes. Give steps_per_epoch, or pass a loader or a "
                "dataset, which can be begun anew."
            )

    @property
    def generators(self) -> list[torch.Generator]:
        """Random generators of the user's own loader."""
        return list(self._batches.source.generators)

    @property
    def num_calls(self) -> int | None:
        """Calls per epoch; None if unknown."""
        return self._batches.num_calls if self._calls is None else self._calls

    def __iter__(self) -> Iterator[Call]:
        """The calls of the next epoch."""
        if self._calls is None:
            yield from self._batches
            return
        self.ran_out = False
        done, self._calls_done = self._calls_done, 0
        for number in range(done, self._calls):
            call = self._next(may_restart=number == 0)
            if call is None:
                self.ran_out = True
                return
            yield call

    def _next(self, *, may_restart: bool) -> Call | None:
        """The next call; None at the end of the data."""
        if self._iterator is None:
            self._iterator = iter(self._batches)
        call = next(self._iterator, None)
        if call is None:
            self._iterator = None
            self.is_spent = self._batches.source.is_one_shot
            if may_restart and not self.is_spent:
                return self._next(may_restart=False)
        return call
