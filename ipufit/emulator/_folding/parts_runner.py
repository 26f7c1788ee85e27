# SPDX-License-Identifier: Apache-2.0
"""Run updates one after the other, and what they don't need for many at once."""

from __future__ import annotations

import contextlib
from time import perf_counter
from typing import Callable, ClassVar, Iterator, Sequence

import torch
from torch import Tensor

from ipufit.emulator._device.loop_runner import (
    Backward,
    Collect,
    LoopRunner,
    make_updates,
    update_after_each,
)
from ipufit.emulator._device.replacing import replaced
from ipufit.emulator._device.runner import Call, Mark, Results, Training
from ipufit.emulator._folding.folding import ERRORS
from ipufit.emulator._folding.parts import Function, Parts
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._layout.layout import Inputs

_MOST_WEIGHTS = 8 * 2**20
_MOST_KEPT = 2**20
_MOST_EARLY = 8 * 2**20
_LEAST_SAVED = 3


class PartsRunner:
    """Runs a training program in parts (`Parts`), where that saves operations.

    No bit of any result changes. Folds of a part are checked when they run first: if
    one gives anything else, the program runs whole from the next call on.

    Where a micro-batch takes milliseconds there is nothing to gain, so programs with
    more than 8 MiB of weights run whole.

    Args:
        whole: Runs programs whole.
    """

    first_part: ClassVar[tuple[str, str]] = ("forward", "forward")

    def __init__(self, whole: LoopRunner) -> None:
        self._whole = whole
        self._is_decided = False
        self._parts: Parts | None = None
        self._size = 0

    @property
    def parts(self) -> Parts | None:
        """The parts of the program; None if it runs whole, or hasn't run yet."""
        return self._parts

    @contextlib.contextmanager
    def marked(self, call: Call, mark: Mark) -> Iterator[None]:
        """Run a marked copy of the core, or of the program, while the context is open.

        What runs early and late is of no module: it isn't marked.
        """
        decide = self._decide
        with contextlib.ExitStack() as stack:

            def mark_core() -> None:
                if self._parts is not None:
                    core = mark(self._parts.core)
                    stack.enter_context(replaced(self._parts, core=core))

            def decide_and_mark(call: Call) -> None:
                decide(call)
                mark_core()

            stack.enter_context(self._whole.marked(call, mark))
            stack.enter_context(replaced(self, _decide=decide_and_mark))
            mark_core()
            yield

    def infer(self, call: Call) -> None:
        """Run each micro-batch of an inference call once."""
        self._whole.infer(call)

    def train(self, call: Call, training: Training) -> None:
        """Run the updates of a training call."""
        if not self._is_decided:
            self._is_decided = True
            self._decide(call)
        parts = self._parts
        if parts is None or training.watch is not None:
            self._whole.train(call, training)
            return
        rows = self._rows(call)
        late = _Late(call, parts.ranks, self._late, self._size)
        if call.micro_batches_per_update == 1:
            update_after_each(call, training, parts.core, rows.__getitem__, late.add)
        else:
            make_updates(call, training, _Core(parts.core, rows, late.add).run)
        late.run()
        if not (self._early.is_exact and self._late.is_exact):
            self._parts = None
            logger.warning(
                "Operations that no update needs run for each micro-batch, since they "
                "give something else for several at once."
            )

    def _decide(self, call: Call) -> None:
        count, weights = len(call.micro_batches), call.arguments(0)
        if _num_bytes(weights) > _MOST_WEIGHTS:
            return
        try:
            parts = Parts(call.program, [*weights, *call.inputs.rows(0)])
        except ERRORS:
            return
        self._size = min(count, _MOST_KEPT // max(1, parts.kept_bytes))
        is_small = self._size > 1 and count * parts.early_bytes <= _MOST_EARLY
        if is_small and parts.num_saved >= _LEAST_SAVED:
            self._parts = parts
            self._early = _Folds(parts.run_early, parts.early_of_one)
            self._late = _Folds(parts.run_late, parts.late_of_one)

    def _rows(self, call: Call) -> list[Results]:
        """The rows of each micro-batch, with its early values after them."""
        rows = [call.inputs.rows(index) for index in call.micro_batches]
        if self._parts is None or not self._parts.early:
            return rows
        with torch.no_grad():
            columns = self._early.run(call.inputs, 0, len(rows), ())
        early = zip(*(column.unbind(0) for column in columns))
        return [(*own, *numbers) for own, numbers in zip(rows, early)]


class _Folds:
    """The folds of a part, by the number of micro-batches.

    Args:
        make: Makes a fold.
        of_one: Runs the part for one micro-batch.

    Attributes:
        is_exact: Whether all folds so far gave what single micro-batches give.
    """

    def __init__(self, make: Callable[[int], Function], of_one: Function) -> None:
        self._make = make
        self._of_one = of_one
        self._folds: dict[int, Function] = {}
        self.is_exact = True

    def run(
        self, inputs: Inputs, first: int, count: int, cuts: Sequence[Sequence[Tensor]]
    ) -> Results:
        """Run the part for some micro-batches.

        Args:
            inputs: Have the rows.
            first: The index of the first micro-batch.
            count: Number of micro-batches.
            cuts: For each cut the values of all of them.

        Returns:
            For each result of the part the values of all, joined or stacked.
        """
        if count in self._folds:
            return self._run_fold(self._folds[count], inputs, first, count, cuts)
        ones = [
            self._of_one(*inputs.rows(first + index), *(cut[index] for cut in cuts))
            for index in range(count)
        ]
        results = tuple(map(_together, zip(*ones)))
        try:
            fold = self._make(count)
            folded = self._run_fold(fold, inputs, first, count, cuts)
            self.is_exact &= all(map(_are_equal, results, folded))
        except ERRORS:
            self.is_exact = False
        if self.is_exact:
            self._folds[count] = fold
        return results

    def _run_fold(
        self,
        fold: Function,
        inputs: Inputs,
        first: int,
        count: int,
        cuts: Sequence[Sequence[Tensor]],
    ) -> Results:
        stacked = [torch.stack(list(cut)) for cut in cuts]
        return fold(*inputs.joined(first, count), *stacked)


class _Late:
    """Keeps what the core leaves, and gives outputs the results of micro-batches.

    Args:
        call: Has the rows, and the outputs that take the results.
        ranks: For each result that is computed late its number of dimensions; None
            for those that the core returns.
        folds: Compute those that are.
        size: The number of micro-batches to keep at most.
    """

    def __init__(
        self, call: Call, ranks: Sequence[int | None], folds: _Folds, size: int
    ) -> None:
        self._call = call
        self._ranks = ranks
        self._folds = folds
        self._size = size
        self._first = 0
        self._kept: list[Results] = []

    def add(self, step: int, replica: int, results: Results) -> None:
        """Take the cuts and results of one micro-batch, in the order of the layout."""
        self._kept.append(tuple([tensor.detach() for tensor in results]))
        if len(self._kept) == self._size:
            self.run()

    @torch.no_grad()
    def run(self) -> None:
        """Compute the results of those that are kept, and forget them."""
        if not self._kept:
            return
        call, count = self._call, len(self._kept)
        columns = list(zip(*self._kept))
        num_cuts = len(columns) - self._ranks.count(None)
        cuts, others = columns[:num_cuts], iter(columns[num_cuts:])
        late = iter(self._folds.run(call.inputs, self._first, count, cuts))
        if call.outputs.takes_whole:
            call.outputs.add_whole(
                [
                    _together(next(others)) if rank is None else next(late)
                    for rank in self._ranks
                ]
            )
        else:
            parts = [
                next(others) if rank is None else _apart(next(late), rank, count)
                for rank in self._ranks
            ]
            for index, results in enumerate(zip(*parts), self._first):
                call.collect(index, results)
        self._first += count
        self._kept.clear()


class _Core:
    """Runs the cores of updates of several micro-batches.

    Args:
        core: The core of the program.
        rows: The rows and the early values of each micro-batch.
        add: Takes the step, the replica and the results of each.
    """

    def __init__(
        self,
        core: Function,
        rows: list[Results],
        add: Callable[[int, int, Results], None],
    ) -> None:
        self._core = core
        self._rows = rows
        self._add = add

    def run(
        self,
        call: Call,
        indices: range,
        collect: Collect,
        backward: Backward | None = None,
    ) -> None:
        """Run the micro-batches of an update, without the late part."""
        taken = call.inputs.taken
        for index in indices:
            taken.append(perf_counter())
            with torch.enable_grad():
                *results, loss = self._core(*call.arguments(index), *self._rows[index])
            if backward is not None:
                backward(loss)
            self._add(*divmod(index, call.layout.replicas), tuple(results))


def _together(values: Sequence[Tensor]) -> Tensor:
    """The values of several micro-batches: stacked if they are numbers, else joined."""
    return (
        torch.stack(list(values)) if values[0].dim() == 0 else torch.cat(list(values))
    )


def _apart(values: Tensor, rank: int, count: int) -> Sequence[Tensor]:
    """The value of each micro-batch, of values of so many dimensions each."""
    return torch.split(values, len(values) // count) if rank else torch.unbind(values)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are the same bit by bit, but for kinds of zero and of NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    is_same = torch.eq(one, other)
    if one.is_floating_point():
        is_same |= one.isnan() & other.isnan()
    return bool(is_same.all())


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
