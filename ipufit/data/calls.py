# SPDX-License-Identifier: Apache-2.0
"""What gives an engine its calls, through PopTorch's loader or from a stream."""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterator, NamedTuple

import torch

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.errors import DataError
from ipufit.types import Batch

from .datasets import ArrayDataset
from .error_report import ErrorReport, ReportedRows
from .gathering import GatheredCalls
from .orders import InOrder, Order
from .ranges import check_integers
from .rebatching import collate
from .seeded import SeededRows
from .source import Source
from .structure import SampleStructure


class Call(NamedTuple):
    """The rows of one call.

    Attributes:
        batch: The tensors of the structure, in order.
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

    @property
    def _is_elsewhere(self) -> bool:
        """Whether other processes load the samples."""
        return self.num_workers > 0 or self.mode != "sync"

    def seeds(self, dataset: Any) -> bool:
        """Whether each sample is loaded with random numbers of its own.

        That is, in other processes. Samples in memory draw none.

        Args:
            dataset: Map-style; None for a stream.
        """
        is_drawing = dataset is not None and not isinstance(dataset, ArrayDataset)
        return is_drawing and self._is_elsewhere

    def loader(
        self,
        options: poptorch.Options,
        dataset: Any,
        plan: BatchPlan,
        order: Order | InOrder,
        seed: int,
        report: ErrorReport,
    ) -> Any:
        """PopTorch's loader of whole calls; samples in memory need none.

        Args:
            options: Of the model.
            dataset: Map-style.
            plan: The factors of a call.
            order: Of the samples.
            seed: Of what samples draw that other processes load.
            report: Gets the error of PopTorch's process, if that loads.
        """
        if isinstance(dataset, ArrayDataset) and not self._is_elsewhere:
            return GatheredCalls(dataset.tensors, order, plan.samples_per_call)
        if self.seeds(dataset):
            dataset = SeededRows(dataset, seed)
        collating: Any = collate
        if self.mode != "sync":
            dataset = ReportedRows(dataset, report)
            collating = functools.partial(report.calling, collate)
        # Making processes draws a seed for them. A run that is resumed makes them once
        # more than others do, and the numbers of this process mustn't tell.
        starts_here = self.num_workers > 0 and self.mode == "sync"
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
            collate_fn=collating,
            sampler=order,
            generator=torch.Generator() if starts_here else None,
        )

    def _mode_for(self, plan: BatchPlan) -> str:
        """One row per call can't be rebatched: PopTorch refuses it."""
        is_one_row = plan.samples_per_call == 1
        return "async" if is_one_row and self.mode == "async_rebatched" else self.mode


PLAIN = Loading()


class CallBatches:
    """Base of what gives an engine its calls.

    Args:
        source: The samples.
        plan: How many make a call.
        structure: Of the batches.

    Attributes:
        source: As given.
        structure: As given.
    """

    def __init__(
        self, source: Source, plan: BatchPlan, structure: SampleStructure
    ) -> None:
        self.source = source
        self.structure = structure
        self._rows = plan.samples_per_call
        self._loader: Any = None
        self._report = ErrorReport()
        self._on_begun: Callable[[], None] | None = None
        # Samples in memory are checked before a run, all at once.
        dataset = getattr(source, "dataset", None)
        self._is_checked = isinstance(dataset, ArrayDataset)

    def close(self) -> None:
        """End the processes that load, if there are any; the next epoch has others."""
        self._report.take()  # nobody wants it any more
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
            raise DataError(
                f"Samples could not be loaded. {error}\n{self._report.take()}".rstrip()
            ) from error

    def _check(self, batch: Batch, sample_of: Callable[[int], int]) -> None:
        """Refuse numbers that an IPU can't hold.

        Args:
            batch: Of a call.
            sample_of: The index of the sample that is in a row of it.
        """
        if not self._is_checked:
            source = self.source
            check_integers(batch, source.structure, source.name, sample_of)

    def _begin(self) -> None:
        """Do what is to be done once, before the first batch is loaded.

        Making an iterator draws from torch's random numbers.
        """
        act, self._on_begun = self._on_begun, None
        if act is not None:
            act()

    def _make_loader(self) -> Any:
        raise RuntimeError("a stream has a loader of its own")
