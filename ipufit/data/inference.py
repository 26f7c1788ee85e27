# SPDX-License-Identifier: Apache-2.0
"""The calls that cover every sample once; the last is padded."""

from __future__ import annotations

from typing import Any, Iterator, cast

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.errors import DataError
from ipufit.types import Batch

from .calls import PLAIN, Call, CallBatches, Loading
from .orders import InOrder
from .rebatching import first_rows, pad, rebatched
from .source import Block, IndexedSource, Source, StreamSource


class InferenceBatches(CallBatches):
    """The calls that cover every sample once, in order.

    Args:
        source: The samples.
        plan: How many rows make a call.
        options: Of the inference model.
        max_rows: Stop after so many; None to go on to the end.
        loading: How map-style data is loaded.
        seed: Of what samples draw that other processes load: the same in every pass.

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
        seed: int | None = None,
    ) -> None:
        super().__init__(source, plan, source.structure)
        self._plan = plan
        self._options = options
        self._max_rows = max_rows
        self._loading = loading
        self._seed = seed or 0
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
        remaining = count = self.num_samples or 0
        for batch in self._loaded():
            self._check(batch, (count - remaining).__add__)
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
        order = InOrder(count, self._rows, singles)
        return self._loading.loader(
            self._options, dataset, self._plan, order, self._seed, self._report
        )

    def _streamed(self, source: StreamSource) -> Iterator[Call]:
        real: Batch = []
        total = 0
        for batch, num_real in rebatched(self._blocks(source), self._rows):
            self._check(batch, total.__add__)
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
        return first_rows(self._ongoing or source.blocks(), self._max_rows)
