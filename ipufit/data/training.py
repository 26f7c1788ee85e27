# SPDX-License-Identifier: Apache-2.0
"""The calls of training.

What doesn't fill a call is dropped and counted, or padded with rows that count nothing.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Sequence, cast

import torch

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.errors import DataError
from ipufit.types import Batch

from .calls import PLAIN, Call, CallBatches, Loading
from .class_weights import ClassWeights
from .host_random import RandomState, random_state, set_random_state
from .orders import BEGINNING, Order, Position
from .passes import Pass, Replay
from .rebatching import pad, rebatched, shares
from .source import IndexedSource, Source, StreamSource


class TrainingBatches(CallBatches):
    """The calls of a training epoch.

    Args:
        source: The samples.
        plan: How many make a call.
        options: Of the training model.
        shuffle: Draw a new order every epoch; streams come as they are.
        seed: Of the orders, and of samples that other processes load; None to draw it
            from torch's global generator.
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
        position: The pass, and the calls of it that were given out.
        seed: Of the orders; drawn from torch's generator if none was given.
        is_seeded: Whether each sample has random numbers of its own.
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
        start: Position = BEGINNING,
    ) -> None:
        self._class_weights = (
            None
            if class_weight is None
            else ClassWeights(class_weight, source.structure)
        )
        weights = self._class_weights
        structure = source.structure if weights is None else weights.structure
        super().__init__(source, plan, structure)
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
            self.structure = self.structure.padded()
            if left and self.num_calls is not None:
                self.num_calls += 1
                self.num_empty_updates = (self._rows - left) // self._per_update
        self._loading, self._options, self._plan = loading, options, plan
        self._shuffle, self._start = shuffle, start
        self.is_seeded = loading.seeds(getattr(source, "dataset", None))
        if (shuffle or self.is_seeded) and seed is None:
            # Drawn here and not in a process that loads: those are copies of this one.
            seed = int(torch.empty((), dtype=torch.int64).random_())
        self.seed = seed or 0
        self.position = start
        self._pass: Pass | None = None
        self._is_exhausted = self._is_going_on = False

    # A run that is resumed ----------------------------------------------------

    def replay(self) -> Replay | None:
        """What it takes to come to this place of the pass again.

        None if none is begun, or if it takes nothing: samples that are taken by index
        are not drawn again.
        """
        if not isinstance(self.source, StreamSource):
            return None
        if self.position.calls and self._pass is not None:
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
            self.source.go_on(replay, is_due=not self.position.calls)
        set_random_state(now, generators)
        self._is_going_on = self.position.calls > 0

    # Calls --------------------------------------------------------------------

    def _make_loader(self) -> Any:
        return self._loading.loader(
            self._options,
            cast(IndexedSource, self.source).dataset,
            self._plan,
            self._order(tells_pass=self.is_seeded),
            self.seed,
            self._report,
        )

    def _order(self, *, tells_pass: bool = False) -> Order:
        """The order of samples that are taken by index, from this place on."""
        count = cast(IndexedSource, self.source).num_samples
        length = (self.num_calls or 0) * self._rows if self._is_padding else count
        seed = self.seed if self._shuffle else None
        return Order(
            count, length, seed, self.position, self._rows, tells_pass=tells_pass
        )

    def _sample_of(self, row: int) -> int:
        """The index of the sample that is in a row of the next call."""
        if isinstance(self.source, StreamSource):
            return self.position.calls * self._rows + row
        return int(self._order().indices()[row])

    def example(self) -> Batch:
        """What the batch of a call looks like."""
        return self._completed(self.source.example(self._rows), self._rows)

    def __iter__(self) -> Iterator[Call]:
        """The calls of one pass, from the place that was reached."""
        self.begin_next_pass()
        if self._is_going_on:
            # Coming to that place draws numbers that the interrupted run has drawn.
            self._is_going_on = False
            self._on_begun = _restoring(self.source.generators)
        if isinstance(self.source, StreamSource):
            yield from self._streamed(self.source)
        elif self.position.calls and self.position.calls == self.num_calls:
            self._begin()  # PopTorch's asynchronous loader refuses to give nothing
        else:
            remaining = (
                self.source.num_samples or 0
            ) - self.position.calls * self._rows
            for batch in self._loaded():
                num_real = min(remaining, self._rows)
                remaining -= num_real
                self._check(batch, self._sample_of)
                self._count_call()
                yield Call(self._completed(batch, num_real), num_real)
        self._is_exhausted = True

    def begin_next_pass(self) -> None:
        """Be at the beginning of the next pass, if all of this one was given out."""
        if self._is_exhausted:
            self._is_exhausted = False
            self.position = Position(self.position.number + 1)

    def _count_call(self) -> None:
        self.position = self.position._replace(calls=self.position.calls + 1)

    def _streamed(self, source: StreamSource) -> Iterator[Call]:
        calls = dropped = empty = 0
        skipped = self.position.calls
        blocks = source.blocks()
        self._pass = blocks if isinstance(blocks, Pass) else None
        for batch, num_real in rebatched(blocks, self._rows):
            if num_real == self._rows or self._is_padding:
                calls += 1
                if calls <= skipped:
                    if calls == skipped:
                        self._begin()
                    continue
                self._check(batch, self._sample_of)
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


def _restoring(generators: Sequence[torch.Generator]) -> Callable[[], None]:
    """What brings the random states of now back."""
    now = random_state(generators)
    return lambda: set_random_state(now, generators)
