# SPDX-License-Identifier: Apache-2.0
"""The data of inference calls: every sample once, and the last call padded."""

from __future__ import annotations

from functools import partial
from typing import Iterator

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.distributed import Processes
from ipufit.errors import DataError
from ipufit.types import Batch

from .calls import PLAIN, Call, CallLoader, Loading
from .division import Division
from .orders import InOrder
from .rebatching import first_rows, pad, rebatched
from .sharing import agreed, endless, shared
from .source import ALONE, Block, Source, StreamSource


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
