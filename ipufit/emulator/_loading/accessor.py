# SPDX-License-Identifier: Apache-2.0
"""Iterates over data that a background process reads ahead."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import tempfile
import weakref
from typing import Any, Iterator

import torch
import torch.utils.data
from torch import Tensor

from ipufit.emulator._ground.checks import require
from ipufit.emulator._ground.custom_args import pickled_parsers
from ipufit.emulator._loading.accessor_worker import (
    Begin,
    EpochEnd,
    Failed,
    Ready,
    Release,
    Restart,
    Started,
    WorkerSetup,
)
from ipufit.emulator._loading.worker_process import WorkerProcess
from ipufit.emulator.enums import SharingStrategy
from ipufit.emulator.errors import createPoptorchError


class AsynchronousDataAccessor:
    """Iterates over a dataset that a background process reads ahead.

    The process starts at once, and the constructor returns when it has read the
    first element. It puts each element into one of `buffer_size` slots of shared
    memory. **What the iterator returns are views of a slot, valid until the next
    element is requested**: clone what has to live longer (PopTorch user guide,
    "poptorch.AsynchronousDataAccessor").

    The accessor is its own, only iterator. `iter` starts the dataset from its
    beginning, unless no element of the present epoch was taken yet. Lists, tuples
    and named tuples come back as lists. As in PopTorch, later elements are copied
    into tensors like those of the first one: other dtypes are cast and shapes that
    can be broadcast are broadcast, silently; other shapes are an error.

    Where this differs from PopTorch: a non-tensor in an element always gives the
    documented error; the process's torch generator continues from this process's
    state with every sharing strategy, so that shuffling obeys `torch.manual_seed`;
    and a full ring is waited for without waking up in between.

    Scripts need an `if __name__ == "__main__"` guard, and the dataset must be
    picklable, except with `SharingStrategy.Fork`. It needs a POSIX system.

    Args:
        dataset: Any iterable of tensors, of flat lists, tuples or dicts of tensors,
            or of objects whose exact type has an `ICustomArgParser`.
        buffer_size: Elements that fit into the shared memory.
        miss_sleep_time_in_ms: How the process waits while the ring is full: 0 spins,
            anything else sleeps until the consumer has freed a slot.
        load_indefinitely: Whether the next epoch is read as soon as one ends,
            rather than when it is asked for. The iterator stops at each end anyway.
        early_preload: Whether to fill the ring before the first `iter`, rather than
            one slot.
        sharing_strategy: Way in which the dataset gets to the process.
        rebatched_size: Collect this many rows in each slot, across elements, whose
            tensors must all have as many rows and not more than this. Rows that
            remain at the end are dropped, unless the dataset has a false attribute
            `rebatched_drop_last`.

    Raises:
        AssertionError: If `rebatched_size` isn't above 1, if `buffer_size` isn't
            positive, or if the dataset is a `DataLoader` that keeps its incomplete
            last batch and isn't rebatched.
        Error: If the dataset is a `DataLoader` in an asynchronous mode, if it is
            empty, or if its first element can't be read or isn't made of tensors.

    Example:
        >>> import torch
        >>> from ipufit.emulator import AsynchronousDataAccessor
        >>> accessor = AsynchronousDataAccessor([torch.tensor([1.0]), torch.ones(1)])
        >>> [float(element) for element in accessor]
        [1.0, 1.0]
        >>> accessor.terminate()
    """

    def __init__(
        self,
        dataset: Any,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: int | None = None,
    ) -> None:
        self._worker: WorkerProcess | None = None
        _check_loader(dataset, rebatched_size)
        require(
            rebatched_size is None or rebatched_size > 1,
            f"rebatched_size must be None or greater than 1, not {rebatched_size}.",
        )
        require(buffer_size > 0, f"buffer_size must be positive, not {buffer_size}.")
        self._dataset = dataset
        self._rebatched_size = rebatched_size
        self._num_slots = buffer_size
        self._generation = 0
        self._num_held = 0
        self._has_begun = False
        self._has_consumed = False
        self._is_at_end = False
        self._is_idle = False
        self._has_failed = False
        setup = WorkerSetup(
            dataset=dataset,
            dataset_path=None,
            num_slots=buffer_size,
            is_spinning=miss_sleep_time_in_ms == 0,
            load_indefinitely=load_indefinitely,
            early_preload=early_preload,
            rebatched_size=rebatched_size,
            rng_state=torch.get_rng_state().numpy().tobytes(),
            parsers=pickled_parsers(),
        )
        with _dataset_in_file(setup, sharing_strategy) as final_setup:
            self._worker = WorkerProcess(final_setup, sharing_strategy)
            _terminate_at_exit(self)
            try:
                start, ring = self._worker.receive_start()
            except BaseException:
                self.terminate()
                raise
        self._structure = start.structure
        self._slots = ring.slots

    def terminate(self) -> None:
        """End the background process; does nothing the second time.

        A process that doesn't react is interrupted after 10 seconds and killed after
        20. Elements that were returned stay readable.

        Example:
            >>> import torch
            >>> from ipufit.emulator import AsynchronousDataAccessor
            >>> accessor = AsynchronousDataAccessor([torch.ones(1)])
            >>> accessor.terminate()
        """
        if self._worker is None or self._worker.is_inherited:
            return
        worker, self._worker = self._worker, None
        self._slots = []  # the memory stays for as long as there are elements
        worker.end()

    def __del__(self) -> None:
        self.terminate()

    # Iteration ----------------------------------------------------------------

    def __len__(self) -> int:
        """Number of elements that one epoch returns."""
        if self._rebatched_size is None:
            return len(self._dataset)
        num_rows: int = len(self._dataset) * self._dataset.batch_size
        return num_rows // self._rebatched_size

    def __iter__(self) -> Iterator[Any]:
        worker = self._running_worker()
        is_first = not self._has_begun
        self._has_begun = True
        if is_first:
            worker.send(Begin())
        elif self._is_idle or (self._has_consumed and not self._is_at_end):
            self._generation += 1
            worker.send(Restart(self._generation))
        self._has_consumed = self._is_at_end = self._is_idle = False
        return self

    def __next__(self) -> Any:
        worker = self._running_worker()
        if not self._has_begun:
            iter(self)
        if self._is_at_end:
            raise StopIteration
        if self._num_slots == 1:  # nothing can be read ahead while it's held
            self._release(worker, self._num_held)
        reply = self._next_of_generation(worker)
        if isinstance(reply, EpochEnd):
            self._is_at_end = True
            self._is_idle = reply.is_idle
            raise StopIteration
        self._release(worker, self._num_held)
        self._num_held = 1
        self._has_consumed = True
        return self._structure.rebuild(self._views(reply))

    def _running_worker(self) -> WorkerProcess:
        if self._worker is None:
            raise AssertionError(
                "This AsynchronousDataAccessor was terminated: make a new one."
            )
        return self._worker

    def _next_of_generation(self, worker: WorkerProcess) -> Ready | EpochEnd:
        """Wait for the next reply, and skip those from before a restart."""
        while True:
            reply = Failed() if self._has_failed else worker.receive()
            if isinstance(reply, Failed):
                self._has_failed = True
                raise AssertionError(
                    "An error occurred in the data fetcher, the process that reads the "
                    f"dataset. {worker.cause()}"
                )
            if isinstance(reply, Started):
                raise AssertionError("The data fetcher started twice.")
            if reply.generation == self._generation:
                return reply
            if isinstance(reply, Ready):
                self._release(worker, self._num_held + 1)

    def _release(self, worker: WorkerProcess, count: int) -> None:
        for _ in range(count):
            worker.send(Release())
        self._num_held = 0

    def _views(self, ready: Ready) -> list[Tensor]:
        # A view of its own for each turn: the caller may resize or retype it.
        slot = [tensor.view(tensor.shape) for tensor in self._slots[ready.slot]]
        if ready.num_rows is None:
            return slot
        return [tensor.narrow(0, 0, ready.num_rows) for tensor in slot]


_accessors: weakref.WeakSet[AsynchronousDataAccessor] = weakref.WeakSet()


def _terminate_at_exit(accessor: AsynchronousDataAccessor) -> None:
    """End the process before multiprocessing waits for it at exit, for ever.

    The handler runs first because it is registered after multiprocessing's own.
    """
    atexit.unregister(_terminate_all)
    atexit.register(_terminate_all)
    _accessors.add(accessor)


def _terminate_all() -> None:
    for accessor in list(_accessors):
        accessor.terminate()


@contextlib.contextmanager
def _dataset_in_file(
    setup: WorkerSetup, strategy: SharingStrategy
) -> Iterator[WorkerSetup]:
    """Keep the dataset in a file while the process starts, if the strategy says so."""
    if strategy != SharingStrategy.FileSystem:
        yield setup
        return
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "dataset.pickle")
        with open(path, "wb") as file:
            pickle.dump(setup.dataset, file, protocol=4)
        yield setup._replace(dataset=None, dataset_path=path)


def _check_loader(dataset: Any, rebatched_size: int | None) -> None:
    """Refuse data loaders whose last batch the slots can't hold.

    It goes by attributes, because the module `dataloader` imports this one.
    """
    if not isinstance(dataset, torch.utils.data.DataLoader):
        return
    if getattr(dataset, "_accessor", None) is not None:
        raise createPoptorchError(
            "An AsynchronousDataAccessor needs a DataLoader with "
            "mode=DataLoaderMode.Sync: in the other modes it already has an accessor."
        )
    require(
        rebatched_size is not None
        or getattr(dataset, "_user_drop_last", dataset.drop_last)
        or getattr(dataset, "combinedBatchSize", None) in (None, 1),
        "A DataLoader with drop_last=False ends with a smaller batch, which has no "
        "place among the others: pass drop_last=True, or a rebatched_size.",
    )
