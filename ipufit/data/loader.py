# SPDX-License-Identifier: Apache-2.0
"""Batches of calls, through PopTorch's loader or from a stream.

Training drops what doesn't fill a call and counts it, or pads it with rows that count
nothing; inference pads the last call and says how many rows are real.
"""

from __future__ import annotations

import hashlib
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence, cast

import torch
from torch import Tensor
from torch.utils.data import Sampler, default_collate

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.errors import DataError
from ipufit.types import Batch

from .adapters import unequal_shapes
from .class_weights import ClassWeights
from .datasets import StackedRows
from .host_random import RandomState, set_random_state
from .layout import Layout
from .passes import Pass, Replay
from .source import Block, IndexedSource, Source, StreamSource


class Call(NamedTuple):
    """The rows of one call.

    Attributes:
        batch: The tensors of the layout, in order.
        num_real: Rows that are no padding; they come first.
    """

    batch: Batch
    num_real: int


class Loading(NamedTuple):
    """How map-style data is loaded.

    Attributes:
        num_workers: Processes that load; 0 for none but this one.
        mode: `IPUConfig`'s `loader_mode`.
    """

    num_workers: int = 0
    mode: str = "sync"

    def loader(
        self,
        options: poptorch.Options,
        dataset: Any,
        plan: BatchPlan,
        sampler: Sampler[int],
    ) -> Any:
        """PopTorch's loader of whole calls."""
        modes = {
            "sync": poptorch.DataLoaderMode.Sync,
            "async": poptorch.DataLoaderMode.Async,
            "async_rebatched": poptorch.DataLoaderMode.AsyncRebatched,
        }
        return poptorch.DataLoader(
            options,
            dataset,
            batch_size=plan.micro_batch_size,
            num_workers=self.num_workers,
            drop_last=True,
            mode=modes[self._mode_for(plan)],
            collate_fn=collate,
            sampler=sampler,
        )

    def _mode_for(self, plan: BatchPlan) -> str:
        """One row per call can't be rebatched: PopTorch refuses it."""
        is_one_row = plan.samples_per_call == 1
        return "async" if is_one_row and self.mode == "async_rebatched" else self.mode


PLAIN = Loading()


class Place(NamedTuple):
    """Where training is in its data.

    Attributes:
        number: Of the pass, from 0; each has an order of its own.
        calls: Of that pass that were given out.
    """

    number: int = 0
    calls: int = 0


BEGINNING = Place()


class CallBatches:
    """Base of what gives an engine its calls.

    Args:
        source: The samples.
        plan: How many make a call.
        layout: Of the batches.

    Attributes:
        source: As given.
        layout: As given.
    """

    def __init__(self, source: Source, plan: BatchPlan, layout: Layout) -> None:
        self.source = source
        self.layout = layout
        self._rows = plan.samples_per_call
        self._loader: Any = None
        self._on_begun: Callable[[], None] | None = None

    def close(self) -> None:
        """End the processes that load, if there are any; the next epoch has others."""
        loader, self._loader = self._loader, None
        if loader is None:
            return
        loader.terminate()
        # Workers outlive an epoch, and torch has no public way to end them while
        # something refers to their iterator, such as the traceback of an error.
        workers = getattr(loader, "_iterator", None)
        if workers is not None:
            workers._shutdown_workers()

    def _loaded(self) -> Iterator[Batch]:
        """The loader's batches, as lists.

        Raises:
            DataError: The process that loads has failed.
        """
        try:
            if self._loader is None:
                self._loader = self._make_loader()
            iterator = iter(self._loader)
            self._begin()
            batch = next(iterator, None)
            while batch is not None:  # `for` calls iter(), and PopTorch's begins anew
                yield list(batch)
                batch = next(iterator, None)
        except (AssertionError, poptorch.Error) as error:
            if "data fetcher" not in str(error) and "worker" not in str(error):
                raise
            raise DataError(f"Samples could not be loaded. {error}") from error

    def _begin(self) -> None:
        """Do what is to be done once, before the first batch is loaded.

        Making an iterator draws from torch's random numbers.
        """
        act, self._on_begun = self._on_begun, None
        if act is not None:
            act()

    def _make_loader(self) -> Any:
        raise RuntimeError("a stream has a loader of its own")


class TrainingBatches(CallBatches):
    """The calls of a training epoch.

    Args:
        source: The samples.
        plan: How many make a call.
        options: Of the training model.
        shuffle: Draw a new order every epoch; streams come as they are.
        seed: Of the orders; None for torch's global generator.
        drop_last: Whether samples that don't fill a call are left out; `"pad"` to
            fill the call with rows that don't count.
        class_weight: Class index to weight; None for all alike.
        loading: How map-style data is loaded.
        start: Where to begin, for a run that is resumed; samples before it are not
            loaded, but for streams, whose batches are drawn and dropped.

    Raises:
        DataError: There are not enough samples for one call, or `class_weight` can't
            be used.

    Attributes:
        place: The pass, and the calls of it that were given out.
        seed: Of the orders; drawn from torch's generator if none was given.
        num_calls: Per epoch; None while nobody knows.
        num_dropped: Samples left out of an epoch; None while nobody knows.
        num_empty_updates: Updates of the last call that have padding only.
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
        loading: Loading = PLAIN,
        start: Place = BEGINNING,
    ) -> None:
        self._class_weights = (
            None if class_weight is None else ClassWeights(class_weight, source.layout)
        )
        weights = self._class_weights
        layout = source.layout if weights is None else weights.layout
        super().__init__(source, plan, layout)
        self._per_update = plan.samples_per_update
        is_padding = drop_last in ("pad", False)
        count = source.num_samples
        if count is not None and count < self._rows and not is_padding:
            raise DataError(
                f"`x` has {count} samples, but one training call takes "
                f"{plan.describe()}. Lower one of these, pass more data, or pad with "
                "fit(drop_last='pad')."
            )
        left = None if count is None else count % self._rows
        # A loader of the user's may give fewer samples than it says.
        is_stream = isinstance(source, StreamSource)
        self._is_padding = is_padding and (left != 0 or is_stream)
        self.num_dropped = 0 if is_padding else left
        self.num_calls = None if count is None else count // self._rows
        self.num_empty_updates = 0
        if self._is_padding:
            self.layout = self.layout.padded()
            if left and self.num_calls is not None:
                self.num_calls += 1
                self.num_empty_updates = (self._rows - left) // self._per_update
        self._loading, self._options, self._plan = loading, options, plan
        self._shuffle, self._start = shuffle, start
        if shuffle and seed is None:
            # Drawn here and not in a process that loads: those are copies of this one.
            seed = int(torch.empty((), dtype=torch.int64).random_())
        self.seed = seed or 0
        self.place = start
        self._pass: Pass | None = None

    # A run that is resumed ----------------------------------------------------

    def replay(self) -> Replay | None:
        """What it takes to come to this place of the pass again.

        None if none is begun, or if it takes nothing: samples that are taken by index
        are not drawn again.
        """
        if not isinstance(self.source, StreamSource):
            return None
        if self.place.calls and self._pass is not None:
            return self._pass.replay()
        return self.source.first_pass()

    def go_on(self, now: RandomState, replay: Replay | None) -> None:
        """Have the random states of the interrupted run, from its place on.

        Args:
            now: Those it had.
            replay: Its `replay()`.
        """
        generators = self.source.generators
        if isinstance(self.source, StreamSource):
            self.source.go_on(replay, is_due=not self.place.calls)
        set_random_state(now, generators)
        if self.place.calls:
            self._on_begun = lambda: set_random_state(now, generators)

    # Calls --------------------------------------------------------------------

    def _make_loader(self) -> Any:
        source = cast(IndexedSource, self.source)
        count = source.num_samples
        length = (self.num_calls or 0) * self._rows if self._is_padding else count
        seed = self.seed if self._shuffle else None
        order = _Order(count, length, seed, self.place, self._rows)
        return self._loading.loader(self._options, source.dataset, self._plan, order)

    def example(self) -> Batch:
        """What the batch of a call looks like."""
        return self._completed(self.source.example(self._rows), self._rows)

    def __iter__(self) -> Iterator[Call]:
        """The calls of one pass, from the place that was reached."""
        if isinstance(self.source, StreamSource):
            yield from self._streamed(self.source)
        elif self.place.calls and self.place.calls == self.num_calls:
            self._begin()  # PopTorch's asynchronous loader refuses to give nothing
        else:
            remaining = (self.source.num_samples or 0) - self.place.calls * self._rows
            for batch in self._loaded():
                num_real = min(remaining, self._rows)
                remaining -= num_real
                self._count_call()
                yield Call(self._completed(batch, num_real), num_real)
        self.place = Place(self.place.number + 1)

    def _count_call(self) -> None:
        self.place = self.place._replace(calls=self.place.calls + 1)

    def _streamed(self, source: StreamSource) -> Iterator[Call]:
        calls = dropped = empty = 0
        skipped = self.place.calls
        blocks = source.blocks()
        self._pass = blocks if isinstance(blocks, Pass) else None
        for batch, num_real in rebatched(blocks, self._rows):
            if num_real == self._rows or self._is_padding:
                calls += 1
                if calls <= skipped:
                    if calls == skipped:
                        self._begin()
                    continue
                self._count_call()
                empty = (self._rows - num_real) // self._per_update
                padded = pad(batch, self._rows)
                yield Call(self._completed(padded, num_real), num_real)
            else:
                dropped = num_real
        self._begin()  # at the latest
        self.num_calls, self.num_dropped = calls, dropped
        self.num_empty_updates = empty

    def _completed(self, batch: Batch, num_real: int) -> Batch:
        if self._class_weights is not None:
            batch.append(self._class_weights.of(batch))
        if self._is_padding:
            batch.append(shares(num_real, self._rows, self._per_update))
        return batch


class InferenceBatches(CallBatches):
    """The calls that cover every sample once, in order.

    Args:
        source: The samples.
        plan: How many rows make a call.
        options: Of the inference model.
        max_rows: Stop after so many; None to go on to the end.
        loading: How map-style data is loaded.

    Attributes:
        has_singles: Whether the rows of a micro-batch that is filled in part follow
            once more, each in a micro-batch of its own: what is a mean over rows can
            be told of each of them then.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        options: poptorch.Options,
        *,
        max_rows: int | None = None,
        loading: Loading = PLAIN,
    ) -> None:
        super().__init__(source, plan, source.layout)
        self._plan = plan
        self._options = options
        self._max_rows = max_rows
        self._loading = loading
        self.has_singles = False
        self._ongoing: Iterator[Block] | None = None

    @property
    def num_samples(self) -> int | None:
        """Samples that are gone through; None if nobody knows."""
        count, most = self.source.num_samples, self._max_rows
        if count is None or most is None:
            return count
        return min(count, most)

    @property
    def num_calls(self) -> int | None:
        """Calls; None if nobody knows."""
        count = self.num_samples
        if count is None:
            return None
        return -(-count // self._rows) - (-self._num_single_rows(count) // self._rows)

    def _num_single_rows(self, count: int) -> int:
        """Rows that follow the padding, for single ones."""
        size = self._plan.micro_batch_size
        return count % size * size if self.has_singles else 0

    @property
    def passes_per_call(self) -> int:
        """Forward passes over all replicas in a call: what hooks count."""
        return self._plan.device_iterations

    def num_passes(self, num_rows: int) -> int:
        """Passes that so many rows of a call take."""
        return -(-num_rows // self._plan.samples_per_update)

    def example(self) -> Batch:
        """What the inputs of a call look like."""
        return self.source.example(self._rows, inputs_only=True)

    def __iter__(self) -> Iterator[Call]:
        """Each call; padding comes after its real rows, and is the last one again.

        Calls for single rows have no real ones.
        """
        if isinstance(self.source, StreamSource):
            yield from self._streamed(self.source)
            return
        remaining = self.num_samples or 0
        for batch in self._loaded():
            num_real = min(remaining, self._rows)
            remaining -= num_real
            yield Call(batch, num_real)

    def _make_loader(self) -> Any:
        dataset = cast(IndexedSource, self.source).dataset
        count = self.num_samples or 0
        size = self._plan.micro_batch_size
        num_singles = self._num_single_rows(count) // size
        singles = [
            row for row in range(count - num_singles, count) for _ in range(size)
        ]
        order = _Indices(count, self._rows, singles)
        return self._loading.loader(self._options, dataset, self._plan, order)

    def _streamed(self, source: StreamSource) -> Iterator[Call]:
        real: Batch = []
        total = 0
        for batch, num_real in rebatched(self._blocks(source), self._rows):
            total += num_real
            real = batch
            yield Call(pad(batch, self._rows), num_real)
        if not total:
            raise DataError(
                "There are no more samples: a generator can be gone through once. "
                "Pass a loader or a dataset, which can be begun anew."
            )
        size = self._plan.micro_batch_size
        num_singles = self._num_single_rows(total) // size
        if num_singles:
            block = [t[-num_singles:].repeat_interleave(size, dim=0) for t in real]
            for batch, _ in rebatched([block], self._rows):
                yield Call(pad(batch, self._rows), 0)

    def _blocks(self, source: StreamSource) -> Iterator[Block]:
        """Those of this run: the first ones, but of a generator the next ones."""
        if self._max_rows is None:
            return source.blocks()
        if source.is_one_shot and self._ongoing is None:
            self._ongoing = source.blocks()
        return _first_rows(self._ongoing or source.blocks(), self._max_rows)


class _Indices(Sampler[int]):
    """Every index in order, the last again up to whole calls, then further ones."""

    def __init__(self, count: int, rows: int, further: list[int]) -> None:
        self._count = count
        self._padding = -count % rows
        self._further = further + further[-1:] * (-len(further) % rows)

    def __len__(self) -> int:
        return self._count + self._padding + len(self._further)

    def __iter__(self) -> Iterator[int]:
        yield from range(self._count)
        yield from [self._count - 1] * self._padding
        yield from self._further


class _Order(Sampler[int]):
    """Every index once, then the last one again up to a length.

    With a seed the order is drawn anew for each pass, from the seed and the pass's
    number alone: a run that is resumed, or a process that loads, finds the same.
    """

    def __init__(
        self,
        count: int,
        length: int,
        seed: int | None = None,
        start: Place = BEGINNING,
        rows_per_call: int = 1,
    ) -> None:
        self._count = count
        self._length = length
        self._seed = seed
        self._number = start.number
        self._skipped = start.calls * rows_per_call

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._count))
        if self._seed is not None:
            generator = torch.Generator().manual_seed(_mixed(self._seed, self._number))
            order = torch.randperm(self._count, generator=generator).tolist()
        order += order[-1:] * (self._length - self._count)
        skipped, self._skipped = self._skipped, 0
        self._number += 1
        yield from order[skipped:]


def _mixed(seed: int, number: int) -> int:
    """A seed for each pass; neighbouring seeds don't share any."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def shares(num_real: int, rows: int, rows_per_update: int) -> Tensor:
    """What each row of a call counts in the loss of its update.

    Args:
        num_real: Real rows; they come first.
        rows: Of the call.
        rows_per_update: A divisor of `rows`.

    Returns:
        `[rows]`, float32: 0 for padding; real rows of an update add up to
        `rows_per_update`, so that a mean over all rows is that of the real ones.

    Example:
        >>> shares(3, rows=6, rows_per_update=2)
        tensor([1., 1., 2., 0., 0., 0.])
    """
    is_real = torch.arange(rows).lt(num_real).to(torch.float32)
    per_update = is_real.reshape(-1, rows_per_update)
    counts = per_update.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.flatten(per_update * (rows_per_update / counts))


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
    """Blocks of any number of rows as batches of `rows`, and the rest.

    What is kept from one block to the next is copied, because an asynchronous loader
    uses its memory again.

    Args:
        blocks: With the same leaves.
        rows: Of a batch.

    Yields:
        A batch and its number of rows, which is less than `rows` at the end only.

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


def _first_rows(blocks: Iterator[Block], most: int | None) -> Iterator[Block]:
    if most is None:
        yield from blocks
        return
    for block in blocks:
        yield [leaf[:most] for leaf in block]
        most -= min(most, len(block[0]))
        if not most:
            return


def collate(samples: Any) -> Batch:
    """Stack samples into the tensors of a call.

    Raises:
        DataError: They can't be stacked.

    Example:
        >>> [t.shape for t in collate([(torch.zeros(3), 1), (torch.zeros(3), 0)])]
        [torch.Size([2, 3]), torch.Size([2])]
    """
    if isinstance(samples, StackedRows):
        return list(samples)
    try:
        tensors: list[Tensor] = list(default_collate(samples))
    except RuntimeError as error:
        raise unequal_shapes(error) from error
    return tensors
