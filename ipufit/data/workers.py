# SPDX-License-Identifier: Apache-2.0
"""Loads the calls of a map-style dataset through PopTorch's loader."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import traceback
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NamedTuple

import torch
from torch.utils.data import Dataset

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.distributed import Processes
from ipufit.errors import DataError
from ipufit.types import Batch

from .datasets import ArrayDataset, FlatDataset, collate
from .random_state import HostRandomState


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
        same whichever of them has it. Samples in memory draw nothing.

        Args:
            dataset: Map-style dataset; None for a stream.
            processes: Processes that divide the samples.
        """
        is_loaded = isinstance(dataset, FlatDataset)
        return is_loaded and (self.is_elsewhere or processes.are_several)


_MODES = {
    "sync": poptorch.DataLoaderMode.Sync,
    "async": poptorch.DataLoaderMode.Async,
    "async_rebatched": poptorch.DataLoaderMode.AsyncRebatched,
}


class ErrorReport:
    """Keeps the traceback of an error in another process, until somebody takes it.

    PopTorch's asynchronous loader says only that an error occurred in the data fetcher.
    The error itself is printed by the other process, where notebooks and logs miss it.
    It is kept in a file, which exists only in between.
    """

    def __init__(self) -> None:
        self._path = Path(tempfile.gettempdir(), f"ipufit-{uuid.uuid4().hex}.txt")

    def calling(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, and keep the traceback if it raises an error."""
        try:
            return function(*arguments)
        except Exception:
            flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
            with os.fdopen(os.open(self._path, flags, 0o600), "wb") as file:
                file.write(traceback.format_exc().encode())
            raise

    def take(self) -> str:
        """Return the traceback and delete it; returns `""` if there is none."""
        try:
            text = self._path.read_text(encoding="utf-8")
            self._path.unlink()
        except FileNotFoundError:
            return ""
        return text


@dataclass(frozen=True, eq=False)
class ReportedRows(Dataset):  # type: ignore[type-arg]
    """A map-style dataset whose errors are reported."""

    dataset: Any
    report: ErrorReport

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        """One sample."""
        return self.report.calling(self.dataset.__getitem__, index)

    def __getitems__(self, indices: Any) -> Any:
        """A batch of samples: torch's loaders use this method if it exists."""
        return self.report.calling(self.dataset.__getitems__, indices)


@dataclass(eq=False)
class CallLoader:
    """Loads whole calls of a map-style dataset.

    Processes of `num_workers` live as long as a pass, as torch's do, so that each pass
    sees what has changed in the dataset. The process of an asynchronous loader takes
    seconds to start. It lives until `close`.

    Args:
        dataset: Samples; a `FlatDataset` may seed their random numbers.
        plan: The factors of a call.
        options: Options of the model.
        loading: Which processes load, and how.
    """

    dataset: ArrayDataset | FlatDataset
    plan: BatchPlan
    options: poptorch.Options
    loading: Loading
    _loader: Any = field(default=None, init=False)
    _iterator: Any = field(default=None, init=False)
    _report: ErrorReport = field(default_factory=ErrorReport, init=False)

    def batches(self, order: Iterable[int]) -> Iterator[Batch]:
        """Begin a pass: make the iterator now, which draws from torch's generator.

        Args:
            order: Keys of the samples of this process. Each iteration gives those of
                another pass; an asynchronous loader keeps the first order that it gets.

        Returns:
            The batches of calls, as lists of tensors.

        Raises:
            DataError: The process that loads has failed.
        """
        with self._loading_errors():
            if self.loading.mode == "sync":
                self.close()
            if self._loader is None:
                self._loader = self._new_loader(order)
            self._iterator = iter(self._loader)
        return self._each(self._iterator)

    def _each(self, iterator: Iterator[Any]) -> Iterator[Batch]:
        seeds_here = (
            not self.loading.is_elsewhere
            and getattr(self.dataset, "seed", None) is not None
        )
        while True:  # `for` calls iter(), and PopTorch's begins anew
            before = HostRandomState() if seeds_here else None
            try:
                with self._loading_errors():
                    batch = next(iterator, None)
            finally:
                if before is not None:
                    before.put_back()
            if batch is None:
                return
            yield list(batch)

    def close(self) -> None:
        """End the processes that load; the next pass starts others."""
        self._report.take()  # deletes its file
        loader, self._loader = self._loader, None
        iterator, self._iterator = self._iterator, None
        if loader is not None:
            loader.terminate()
        # torch has no public way to end workers while something refers to their
        # iterator, such as the traceback of an error.
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()

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

    def _new_loader(self, order: Iterable[int]) -> Any:
        plan, (num_workers, mode) = self.plan, self.loading
        given: dict[str, Any] = {}
        if mode == "sync":
            given["persistent_workers"] = False
            # torch draws a seed when processes start. A resumed run starts them once
            # more than others do, which must not change torch's own generator.
            given["generator"] = torch.Generator() if num_workers else None
        if mode == "async_rebatched" and plan.samples_per_call == 1:
            mode = "async"  # PopTorch refuses to rebatch calls of one row
        is_reported = mode != "sync"
        return poptorch.DataLoader(
            self.options,
            ReportedRows(self.dataset, self._report) if is_reported else self.dataset,
            batch_size=plan.micro_batch_size,
            num_workers=num_workers,
            drop_last=True,
            auto_distributed_partitioning=False,  # the order is divided already
            mode=_MODES[mode],
            collate_fn=functools.partial(self._report.calling, collate)
            if is_reported
            else collate,
            sampler=order,
            **given,
        )
