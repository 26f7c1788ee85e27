# SPDX-License-Identifier: Apache-2.0
"""Loads the calls of a map-style dataset through PopTorch's loader."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.distributed import Processes
from ipufit.errors import DataError
from ipufit.types import Batch

from .datasets import ArrayDataset, FlatDataset, collate
from .order import Order
from .random_state import HostRandomState


class Loading(NamedTuple):
    """How map-style data is loaded.

    Attributes:
        num_workers: Number of processes that load; 0 to load in this one.
        mode: `loader_mode` of `IPUConfig`.
    """

    num_workers: int = 0
    mode: str = "sync"


_MODES = {
    "sync": poptorch.DataLoaderMode.Sync,
    "async": poptorch.DataLoaderMode.Async,
    "async_rebatched": poptorch.DataLoaderMode.AsyncRebatched,
}


class CallLoader:
    """Loads whole calls of a map-style dataset.

    Processes of `num_workers` live as long as a pass, as torch's do, so that each pass
    sees what has changed in the dataset. The process of an asynchronous loader takes
    seconds to start. It lives until `close`.

    PopTorch's asynchronous loader says only that an error occurred in the data fetcher.
    The error itself is printed by the other process, where notebooks and logs miss it.
    So the dataset writes its traceback to a file, which exists only in between.

    Args:
        dataset: Samples; None for a stream, of which nothing is loaded.
        plan: The factors of a call.
        options: Options of the model.
        loading: Which processes load, and how.
        processes: Processes that divide the samples.

    Attributes:
        is_seeded: Whether each sample is loaded with random numbers of its own. That is
            so where other processes load, and where several train: a sample is the same
            whichever of them has it. Samples in memory draw nothing.
    """

    def __init__(
        self,
        dataset: ArrayDataset | FlatDataset | None,
        plan: BatchPlan,
        options: poptorch.Options,
        loading: Loading,
        processes: Processes,
    ) -> None:
        self._plan, self._options, self._loading = plan, options, loading
        self._is_elsewhere = loading.num_workers > 0 or loading.mode != "sync"
        self.is_seeded = isinstance(dataset, FlatDataset) and (
            self._is_elsewhere or processes.are_several
        )
        self._dataset: Any = dataset
        self._error_file = Path(tempfile.gettempdir(), f"ipufit-{uuid.uuid4().hex}.txt")
        if isinstance(dataset, FlatDataset):  # another may load it with other seeds
            reported = self._error_file if loading.mode != "sync" else None
            self._dataset = replace(dataset, error_file=reported)
        self._loader: Any = None
        self._iterator: Any = None

    def batches(self, order: Order | Tensor, seed: int) -> Iterator[Batch]:
        """Begin a pass; torch's generator is drawn from now, not with the first batch.

        Args:
            order: Keys of the samples of this process. An `Order` gives those of
                another pass each time; an asynchronous loader keeps its first order.
            seed: Seed of the random numbers that samples draw, if they have their own.

        Returns:
            The batches of calls, as lists of tensors.

        Raises:
            DataError: The process that loads has failed.
        """
        if isinstance(self._dataset, ArrayDataset) and not self._is_elsewhere:
            if self._dataset.rows is not None:
                torch.empty((), dtype=torch.int64).random_()  # as a loader draws a seed
            rows = self._plan.samples_per_call
            keys = order if isinstance(order, Tensor) else order.indices()
            ends = range(rows, len(keys) + 1, rows)
            return (self._dataset.gathered(keys[end - rows : end]) for end in ends)
        if self.is_seeded:
            self._dataset.seed = seed
        with self._loading_errors():
            if self._loading.mode == "sync":
                self.close()
            if self._loader is None:
                keys = order.tolist() if isinstance(order, Tensor) else order
                self._loader = self._new_loader(keys)
            self._iterator = iter(self._loader)
        return self._each(self._iterator)

    def _each(self, iterator: Iterator[Any]) -> Iterator[Batch]:
        keeps_random = self.is_seeded and not self._is_elsewhere
        while True:  # `for` calls iter(), and PopTorch's begins anew
            before = HostRandomState() if keeps_random else None
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
        self._take_error()
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
                f"Samples could not be loaded. {error}\n{self._take_error()}".rstrip()
            ) from error

    def _take_error(self) -> str:
        """Return the traceback of an error, or `""`, and delete its file."""
        with contextlib.suppress(FileNotFoundError):
            text = self._error_file.read_text(encoding="utf-8")
            self._error_file.unlink()
            return text
        return ""

    def _new_loader(self, order: Order | list[int]) -> Any:
        plan, (num_workers, mode) = self._plan, self._loading
        given: dict[str, Any] = {}
        if mode == "sync":
            given["persistent_workers"] = False
            # torch draws a seed when processes start. A resumed run starts them once
            # more than others do, which must not change torch's own generator.
            given["generator"] = torch.Generator() if num_workers else None
        if mode == "async_rebatched" and plan.samples_per_call == 1:
            mode = "async"  # PopTorch refuses to rebatch calls of one row
        return poptorch.DataLoader(
            self._options,
            self._dataset,
            batch_size=plan.micro_batch_size,
            num_workers=num_workers,
            drop_last=True,
            auto_distributed_partitioning=False,  # the order is divided already
            mode=_MODES[mode],
            collate_fn=collate,
            sampler=order,
            **given,
        )
