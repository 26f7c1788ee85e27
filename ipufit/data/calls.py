# SPDX-License-Identifier: Apache-2.0
"""Loads the data of calls from a map-style dataset, through PopTorch's loader."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, NamedTuple

import torch
from torch.utils.data import DataLoader

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.distributed import Processes
from ipufit.errors import DataError
from ipufit.types import Batch

from .carrying import Carrier
from .datasets import ArrayDataset
from .error_report import ErrorReport, ReportedRows
from .gathering import GatheredCalls
from .host_random import HostRandomState
from .orders import InOrder, Order
from .rebatching import collate
from .seeded import SeededRows


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
