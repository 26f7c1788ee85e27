# SPDX-License-Identifier: Apache-2.0
"""Data loaders, and an iterator over data that a background process loads ahead.

The two processes talk over one pipe. The tensors are in a ring of slots in shared
memory. Slots are filled, delivered and released in the order of the ring, so each side
only counts the free slots.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import weakref
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import IO, Any, Iterator, NamedTuple, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

from ._logging import logger
from ._utils import (
    combine_batch_tensors_gen,
    flattenTensorStructure,
    getCustomParser,
    pickled_parsers,
    reconstructTensorStructure,
    registerCustomArgParser,
)
from .core.layout import Layout
from .enums import DataLoaderMode, SharingStrategy
from .errors import createPoptorchError, require
from .options import Options

_START_METHODS = {
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
}
_LIVENESS_PERIOD_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0


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
        miss_sleep_time_in_ms: Unused: while the ring is full, the process sleeps until
            the consumer has freed a slot.
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
        if isinstance(dataset, DataLoader) and dataset._accessor is not None:
            raise createPoptorchError(
                "An AsynchronousDataAccessor needs a DataLoader with "
                "mode=DataLoaderMode.Sync: in the other modes it already has an "
                "accessor."
            )
        if isinstance(dataset, TorchDataLoader):
            require(
                rebatched_size is not None
                or getattr(dataset, "_user_drop_last", dataset.drop_last)
                or getattr(dataset, "combinedBatchSize", None) in (None, 1),
                "A DataLoader with drop_last=False ends with a smaller batch, which "
                "has no place among the others: pass drop_last=True, or a "
                "rebatched_size.",
            )
        require(
            rebatched_size is None or rebatched_size > 1,
            f"rebatched_size must be None or greater than 1, not {rebatched_size}.",
        )
        require(buffer_size > 0, f"buffer_size must be positive, not {buffer_size}.")
        self._dataset = dataset
        self._rebatched_size = rebatched_size
        self._num_slots = buffer_size
        self._generation = -1  # 0 from the first `iter` on, one more at each restart
        self._must_restart = True  # whether `iter` has to ask for the beginning
        self._is_at_end = False
        self._holds_slot = False
        context: Any = multiprocessing.get_context(_START_METHODS[sharing_strategy])
        if sharing_strategy == SharingStrategy.FileSystem:
            # By value: multiprocessing would move its tensors to shared memory.
            dataset = pickle.dumps(dataset, protocol=4)
        self._connection, theirs = context.Pipe()
        is_fork = sharing_strategy == SharingStrategy.Fork
        worker = _Worker(
            dataset,
            theirs,
            self._connection if is_fork else None,
            buffer_size,
            rebatched_size,
            load_indefinitely,
            num_usable=buffer_size if early_preload else 1,
        )
        self._process = context.Process(target=worker.serve)
        self._process.start()
        theirs.close()
        # At exit it runs before multiprocessing waits for the process, and it does
        # nothing in a forked copy of this process.
        self._end = Finalize(
            self, _end, (self._process, self._connection), exitpriority=0
        )
        try:
            self._slots = self._receive_slots()
        except BaseException:
            self._end()
            raise

    def _receive_slots(self) -> list[list[Tensor]]:
        """Wait for the first reply of the process, and map its shared memory."""
        start = self._receive()
        if start is None:
            raise createPoptorchError(
                "AsynchronousDataAccessor worker thread failed to start: its process "
                "could not read the first element of the dataset. "
                f"{self._failure()} If it could not even start: scripts need an "
                "`if __name__ == '__main__'` guard, and datasets must be importable "
                "from there unless they are forked."
            )
        self._like, specs = start
        with os.fdopen(reduction.recv_handle(self._connection), "r+b") as file:
            return slots_of(file, specs, self._num_slots)

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
        self._end()
        self._slots = []  # the memory stays for as long as there are elements

    def _send(self, request: Request) -> None:
        with contextlib.suppress(ConnectionError):  # if it is gone, `_receive` tells
            self._connection.send(request)

    def _receive(self) -> Any:
        """Return the next reply; None if the process has failed or ended."""
        with contextlib.suppress(EOFError, ConnectionError):
            while not self._connection.poll(_LIVENESS_PERIOD_SECONDS):
                # Its children can keep the pipe open after its death.
                if not self._process.is_alive() and not self._connection.poll(0):
                    return None
            return self._connection.recv()
        return None

    def _failure(self) -> str:
        """Return a hint to the process's own message, which has the cause.

        PopTorch does the same (`python/_dataloader.py`).
        """
        self._process.join(_PATIENCE_SECONDS)  # it prints, then ends
        return (
            "Look above for what it printed to its stderr (exit code "
            f"{self._process.exitcode})."
        )

    def _release(self) -> None:
        if self._holds_slot:
            self._send(_RELEASE)
            self._holds_slot = False

    # Iteration ----------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of elements that one epoch returns."""
        if self._rebatched_size is None:
            return len(self._dataset)
        num_rows: int = len(self._dataset) * self._dataset.batch_size
        return num_rows // self._rebatched_size

    def __iter__(self) -> Iterator[Any]:
        self._require_process()
        if self._must_restart:
            self._generation += 1
            self._send(self._generation)
        self._must_restart = self._is_at_end = False
        return self

    def __next__(self) -> Any:
        self._require_process()
        if self._generation < 0:
            iter(self)
        if self._is_at_end:
            raise StopIteration
        while True:
            if self._num_slots == 1:  # nothing can be read ahead while it's held
                self._release()
            reply = self._receive()
            if reply is None:
                raise AssertionError(
                    "An error occurred in the data fetcher, the process that reads the "
                    f"dataset. {self._failure()}"
                )
            if reply.slot is not None:
                self._release()
                self._holds_slot = True
            if reply.generation == self._generation:  # not from before a restart
                break
        self._must_restart = reply.slot is not None or reply.is_idle
        if reply.slot is None:
            self._is_at_end = True
            raise StopIteration
        # A view of its own for each turn: the caller may resize or retype it.
        tensors = [tensor.view(tensor.shape) for tensor in self._slots[reply.slot]]
        if reply.num_rows is not None:
            tensors = [tensor.narrow(0, 0, reply.num_rows) for tensor in tensors]
        return reconstructTensorStructure(self._like, tensors)

    def _require_process(self) -> None:
        require(
            self._slots,
            "This AsynchronousDataAccessor was terminated: make a new one.",
        )


def _end(process: Any, connection: Connection) -> None:
    """End the background process of an accessor."""
    with contextlib.suppress(ConnectionError):
        connection.send(_STOP)
    connection.close()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process.join(_PATIENCE_SECONDS)
        if process.is_alive():
            os.kill(process.pid, number)
    process.join()
    process.close()


# What is sent ---------------------------------------------------------------------

_RELEASE = "release"
"""Request: reuse the slot that was delivered first."""

_STOP = "stop"
"""Request: end the process."""

Request = Union[int, str]
"""One of these, or the number of a restart: read on beyond the first slot, and from the
dataset's beginning unless the number is the one before."""

Spec = Tuple[Tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor in a slot."""


class Reply(NamedTuple):
    """Message of the process: a slot is filled, or the dataset has ended.

    The first message is another one: the skeleton and the specs of an element. The
    descriptor of the shared file follows it. None in place of a reply says that the
    process ends because of an exception, which it prints.

    Attributes:
        generation: Number of restarts before it.
        slot: Index of the filled slot; None at the end of the dataset.
        num_rows: Number of rows in use; None if the slot is full.
        is_idle: Whether the process waits before it reads the next epoch.
    """

    generation: int
    slot: int | None = None
    num_rows: int | None = None
    is_idle: bool = False


def _skeleton(element: Any) -> Any:
    """Return a structure like an element, of empty tensors, with lists for tuples.

    Raises:
        Error: The element is of a type that has no registered parser, or contains
            something else than tensors.
    """
    like, members = element, [element]
    if getCustomParser(element, exact=True) is not None:
        members = []  # its parser knows where the tensors are
    elif isinstance(element, dict):
        like, members = dict(element), [*element.values()]
    elif isinstance(element, (list, tuple)):
        like = members = [*element]
    if not all(isinstance(member, Tensor) for member in members):
        raise createPoptorchError(
            "An element must be a tensor, a flat list, tuple or dict of tensors, "
            f"or of a type with a registered parser; got {_describe(element)}."
        )
    return reconstructTensorStructure(like, itertools.repeat(torch.empty(0)))


def _tensors_of(element: Any, like: Any) -> list[Tensor]:
    """List the detached tensors of an element, in the order of a skeleton.

    Raises:
        Error: There are more or fewer than in the skeleton.
    """
    order = like if isinstance(element, dict) else None
    tensors = list(flattenTensorStructure(element, order))
    count = len(list(flattenTensorStructure(like)))
    if len(tensors) != count:
        raise createPoptorchError(
            f"The first element has {count} tensors, but a later one "
            f"differs: {_describe(element)}."
        )
    return [tensor.detach() for tensor in tensors]


def _describe(element: Any) -> str:
    if isinstance(element, dict):
        parts = [f"{key!r}: {type(item).__name__}" for key, item in element.items()]
        return f"dict {{{', '.join(parts)}}}"
    if isinstance(element, (list, tuple)):
        names = ", ".join(type(item).__name__ for item in element)
        return f"{type(element).__name__} ({names})"
    return type(element).__name__


# Shared memory ------------------------------------------------------------------


def shared_file() -> IO[bytes]:
    """Open a new file in memory. It lives until no process and no tensor uses it."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("poptorch_ring_buffer"), "r+b")
    return tempfile.TemporaryFile()  # not Linux


def slots_of(
    file: IO[bytes], specs: Sequence[Spec], num_slots: int
) -> list[list[Tensor]]:
    """Map a shared file, and return the tensors of each slot.

    Example:
        >>> specs = [((2,), torch.float32)]
        >>> with shared_file() as file:
        ...     writer, reader = (slots_of(file, specs, 3) for _ in range(2))
        >>> _ = writer[1][0].fill_(7.0)
        >>> reader[1]
        [tensor([7., 7.])]
    """
    sizes = [
        math.prod(shape) * torch.empty((), dtype=dtype).element_size()
        for shape, dtype in specs
    ]
    widths = [-(-size // 64) * 64 for size in sizes]  # whole cache lines
    num_bytes = num_slots * sum(widths)
    file.truncate(num_bytes or 1)  # an empty file can't be mapped
    memory: Any = mmap.mmap(file.fileno(), 0)  # the tensors keep it alive
    flat = torch.frombuffer(memory, dtype=torch.uint8).narrow(0, 0, num_bytes)
    return [
        [
            part.narrow(0, 0, size).view(dtype).view(shape)
            for part, size, (shape, dtype) in zip(slot.split(widths), sizes, specs)
        ]
        for slot in flat.view(num_slots, sum(widths))
    ]


# The process --------------------------------------------------------------------


class _Stopped(Exception):
    """Raised when the consumer no longer needs this process."""


class _Restarted(Exception):
    """Raised when the consumer asks for the dataset from its beginning."""


@dataclass
class _Worker:
    """Reads the dataset, epoch after epoch, into the free slots of the ring.

    Attributes:
        dataset: The dataset, or its pickle.
        connection: The process's end of the pipe.
        inherited: The consumer's end of the pipe if forking has copied it. It is
            closed, or the process wouldn't notice that the consumer has ended.
        num_slots: Number of slots of the ring.
        rebatched_size: Rows to collect in each slot; None leaves elements as they are.
        load_indefinitely: Whether to read the next epoch as soon as one ends.
        num_usable: Slots that may be filled before the consumer's first `iter`.
    """

    dataset: Any
    connection: Connection
    inherited: Connection | None
    num_slots: int
    rebatched_size: int | None
    load_indefinitely: bool
    num_usable: int
    rng_state: Any = field(default_factory=lambda: torch.get_rng_state().numpy())
    parsers: list[bytes] = field(default_factory=pickled_parsers)
    generation: int = 0
    num_delivered: int = 0
    num_filled: int = 0

    def serve(self) -> None:
        """Serve one accessor until it stops; the target of the process."""
        if self.inherited is not None:
            self.inherited.close()
        torch.set_num_threads(1)  # as torch's workers: OpenMP doesn't survive a fork
        if sys.platform == "linux":
            # The dataset's own workers: to fork this process, which has one thread,
            # spares each of them seconds of imports. A loader's
            # `multiprocessing_context` wins.
            multiprocessing.set_start_method("fork", force=True)
        # An interrupt, or a consumer that is gone, is no failure of the dataset.
        with contextlib.closing(self.connection), contextlib.suppress(
            _Stopped, KeyboardInterrupt
        ):
            try:
                self._run()
            except _Stopped:
                raise
            except Exception:
                self._send(None)
                raise  # multiprocessing prints it to this process's stderr

    def _run(self) -> None:
        """Read until `_Stopped`, or an exception of the dataset."""
        for parser in self.parsers:
            registerCustomArgParser(*pickle.loads(parser))
        torch.set_rng_state(torch.from_numpy(self.rng_state))
        if isinstance(self.dataset, bytes):
            self.dataset = pickle.loads(self.dataset)
        elements = self._begin(iter(self.dataset))
        while True:
            with contextlib.suppress(_Restarted):
                self._run_epoch(elements)
            # The iterator's own processes end before the dataset starts others.
            elements = iter(())
            elements = iter(self.dataset)

    def _begin(self, elements: Iterator[Any]) -> Iterator[Any]:
        """Read the first element, and make slots of its shapes and types."""
        first: Any = next(elements, self)
        if first is self:
            raise createPoptorchError("The dataset is empty.")
        self._like = _skeleton(first)
        tensors = _tensors_of(first, self._like)
        specs = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        size = self.rebatched_size
        if size is not None:
            _common_rows(tensors, size)
            specs = [((size, *shape[1:]), dtype) for shape, dtype in specs]
        with shared_file() as file:
            self._slots = slots_of(file, specs, self.num_slots)
            self._send((self._like, specs))
            reduction.send_handle(self.connection, file.fileno(), os.getppid())
        return itertools.chain([first], elements)

    def _run_epoch(self, elements: Iterator[Any]) -> None:
        """Fill slots with one element each, or with `rebatched_size` rows each."""
        size, num_rows, num_before = self.rebatched_size, 0, self.num_delivered
        slot = self._next_slot()
        for element in elements:
            sources = _tensors_of(element, self._like)
            if size is None:
                for target, source in zip(slot, sources):
                    target.copy_(source)
                self._deliver()
                slot = self._next_slot()
                continue
            length, num_taken = _common_rows(sources, size), 0
            while num_taken < length:
                count = min(length - num_taken, size - num_rows)
                for target, source in zip(slot, sources):
                    rows = source.narrow(0, num_taken, count)
                    target.narrow(0, num_rows, count).copy_(rows)
                num_taken += count
                num_rows += count
                if num_rows == size:
                    self._deliver()
                    slot, num_rows = self._next_slot(), 0
        if num_rows and not getattr(self.dataset, "rebatched_drop_last", True):
            self._deliver(num_rows)
        # An epoch without data isn't repeated unasked: that would never pause.
        is_idle = not self.load_indefinitely or self.num_delivered == num_before
        self._send(Reply(self.generation, is_idle=is_idle))
        while is_idle:
            self._receive(wait=True)

    def _deliver(self, num_rows: int | None = None) -> None:
        slot = self.num_delivered % self.num_slots
        self._send(Reply(self.generation, slot, num_rows))
        self.num_delivered += 1
        self.num_filled += 1

    def _next_slot(self) -> list[Tensor]:
        """Handle pending requests, and wait until a slot is free."""
        while self._receive(wait=self.num_filled >= self.num_usable):
            pass
        return self._slots[self.num_delivered % self.num_slots]

    def _send(self, reply: Any) -> None:
        """Send a reply, or None if this process fails."""
        try:
            self.connection.send(reply)
        except ConnectionError as error:
            raise _Stopped from error

    def _receive(self, *, wait: bool) -> bool:
        """Handle the next request, and return whether there was one.

        Raises:
            _Restarted: The consumer asks for a restart.
            _Stopped: The consumer asks for the end, or has ended.
        """
        try:
            if not wait and not self.connection.poll(0):
                return False
            request: Request = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise _Stopped from error
        if request == _STOP:
            raise _Stopped
        if request == _RELEASE:
            self.num_filled -= 1
            return True
        self.num_usable = self.num_slots
        if request != self.generation:
            self.generation = int(request)
            raise _Restarted
        return True


def _common_rows(tensors: list[Tensor], limit: int) -> int:
    """Return the number of rows of an element to rebatch.

    Raises:
        Error: If its tensors differ in length, or have more rows than a slot.
    """
    lengths = {len(tensor) if tensor.dim() else limit + 1 for tensor in tensors}
    if len(lengths) != 1 or max(lengths) > limit:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise createPoptorchError(
            "To be rebatched, all tensors of an element need the same number of rows, "
            f"at most rebatched_size = {limit}; got shapes {shapes}."
        )
    return lengths.pop()


# Data loaders ------------------------------------------------------------------


class DataLoader(TorchDataLoader[Any]):
    """Loader whose batches hold the rows of one call.

    One call takes the combined batch, `batch_size * device iterations * input groups
    * gradient accumulation` rows, where input groups are the replicas divided by the
    input replica grouping (PopTorch user guide, "Efficient data batching"). Torch's
    loader is built with that size: `collate_fn`, workers and `loader.batch_size` see
    combined batches. The options are kept and frozen.

    A batch that is smaller at the end of the data is dropped by default; models can't
    take it.

    In the asynchronous modes a background process loads the data, see
    `AsynchronousDataAccessor`: a batch is valid until the next one is requested, and
    `terminate` ends the process. With `AsyncRebatched`, and with `Async` if
    `drop_last` is false, that process joins the workers' incomplete batches, so that
    at most one is lost or incomplete. As in PopTorch's code, but not its guide, the
    workers then load `rebatched_worker_size` elements at a time and by default a
    combined batch.

    With several processes, each loader of a map-style dataset reads its own block; if
    `shuffle` is set, of a permutation of the whole dataset that is the same in all
    processes and drawn anew in each epoch.

    Args:
        options: The options of the model that takes the batches. Gradient
            accumulation counts, so inference needs other options than training.
        dataset: A map-style or iterable dataset.
        batch_size: Rows of a micro-batch; `None` passes elements on as they are and
            needs `drop_last=False`.
        shuffle: Whether map-style data is shuffled; `None` means no.
        num_workers: Processes that load.
        drop_last: Whether an incomplete last batch is dropped.
        persistent_workers: Whether workers outlive an epoch; by default they do.
        auto_distributed_partitioning: Whether each process gets a part of the data.
        mode: Load in this process or in a background process.
        async_options: Arguments of the `AsynchronousDataAccessor`.
        rebatched_worker_size: Elements that workers load at a time when rebatching.
        batch_sampler: Gives the indices of one micro-batch after the other; the
            micro-batches of a call are concatenated.
        **kwargs: Other arguments of torch's `DataLoader`.

    Raises:
        AssertionError: If the options aren't `Options`; if several processes share an
            iterable dataset, or data without batches, or shuffle without a common
            seed (`Options.randomSeed`); or if a size for rebatching is out of range.
        Error: If `batch_sampler` is combined with `batch_size`, `shuffle` or automatic
            partitioning, or if the background process can't start.
        ValueError: Whatever torch's loader refuses.
        ZeroDivisionError: If there is less than one call's data for each process.

    Example:
        >>> import torch
        >>> from ipufit.emulator import DataLoader, Options
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(10))
        >>> loader = DataLoader(Options().deviceIterations(2), dataset, batch_size=2)
        >>> loader.combinedBatchSize, len(loader)
        (4, 2)
        >>> [batch[0].tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    # Also if the loader was refused, or is being unpickled.
    _accessor: AsynchronousDataAccessor | None = None

    def __init__(
        self,
        options: Options,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        if batch_sampler is not None:
            if batch_size != 1 or shuffle:
                raise createPoptorchError(
                    "A batch_sampler decides on batches and their order: it excludes "
                    "batch_size and shuffle."
                )
            if options.Distributed.numProcesses > 1 and auto_distributed_partitioning:
                raise createPoptorchError(
                    "Data with a batch_sampler can't be partitioned for several "
                    "processes: pass auto_distributed_partitioning=False and a sampler "
                    "that does it."
                )
            batch_size = getattr(batch_sampler, "batch_size", 1)
        require(
            isinstance(options, Options),
            f"options must be poptorch.Options, not {type(options).__name__}.",
        )
        options._freeze()
        num_combined = Layout(options).input_blocks
        combined = None
        if batch_size is not None:
            # As in PopTorch, there are no `options` without a batch size.
            self._options = options
            combined = batch_size * num_combined
        self._combined_batch_size = combined
        self._num_joined = 1 if batch_sampler is None else num_combined
        self._user_drop_last = drop_last

        num_processes = options.Distributed.numProcesses
        is_partitioned = num_processes > 1 and auto_distributed_partitioning
        if isinstance(dataset, IterableDataset):
            require(
                not is_partitioned,
                "An iterable dataset can't be partitioned for several processes: pass "
                "auto_distributed_partitioning=False and let the dataset do it.",
            )
            if num_workers > 1 and "worker_init_fn" not in kwargs:
                logger.warning(
                    "Each of the %d workers will go through the whole iterable "
                    "dataset, so each element comes %d times. Pass a worker_init_fn "
                    "that gives each worker a part.",
                    num_workers,
                    num_workers,
                )
        elif batch_sampler is not None and combined is not None:
            _warn_of_incomplete_group(batch_sampler, num_combined, drop_last)
        elif combined and not drop_last:
            _warn_of_smaller_batch(len(dataset), combined, num_processes)
        if is_partitioned:
            dataset = Partition(
                dataset, options, combined, drop_last=drop_last, is_shuffled=shuffle
            )
            shuffle = False

        # The accessor's slots have no place for a smaller batch at the end.
        has_smaller_batch = not drop_last and combined not in (None, 1)
        is_rebatched = mode == DataLoaderMode.AsyncRebatched or (
            mode == DataLoaderMode.Async and has_smaller_batch
        )
        loaded_size = combined
        if is_rebatched and combined is not None:
            if rebatched_worker_size is not None:
                require(
                    rebatched_worker_size <= combined,
                    f"rebatched_worker_size = {rebatched_worker_size} must not exceed "
                    f"the combined batch size, {combined}.",
                )
                loaded_size = rebatched_worker_size
            self.rebatched_drop_last = drop_last if batch_sampler is None else None
        if batch_sampler is None:
            kwargs.update(batch_size=loaded_size, shuffle=bool(shuffle))
            kwargs.update(drop_last=drop_last and not is_rebatched)
        if persistent_workers is None:
            persistent_workers = num_workers > 0
        super().__init__(
            dataset,
            num_workers=num_workers,
            batch_sampler=batch_sampler,
            persistent_workers=persistent_workers,
            **kwargs,
        )
        if mode in (DataLoaderMode.Async, DataLoaderMode.AsyncRebatched):
            async_options = async_options or {}
            require(
                "rebatched_size" not in async_options,
                "The DataLoader decides on rebatched_size: remove it from "
                "async_options and choose a mode instead.",
            )
            self._accessor = AsynchronousDataAccessor(
                self, rebatched_size=combined if is_rebatched else None, **async_options
            )
            # Not a cycle: the process ends as soon as the loader isn't used any more.
            self._accessor._dataset = weakref.proxy(self)

    @property
    def combinedBatchSize(self) -> int | None:
        """Number of rows of one call; `None` without a batch size.

        Example:
            >>> from ipufit.emulator import DataLoader, Options
            >>> options = Options().replicationFactor(4).deviceIterations(2)
            >>> DataLoader(options, list(range(80)), batch_size=5).combinedBatchSize
            40
        """
        return self._combined_batch_size

    @property
    def options(self) -> Options:
        """The options that were passed to the loader, frozen.

        Raises:
            AttributeError: If the loader has no batch size, as in PopTorch.

        Example:
            >>> from ipufit.emulator import DataLoader, Options
            >>> options = Options()
            >>> DataLoader(options, [1, 2]).options is options
            True
        """
        return self._options

    def terminate(self) -> None:
        """End the background process, if there is one.

        Afterwards an asynchronous loader can't be iterated over any more.

        Example:
            >>> from ipufit.emulator import DataLoader, Options
            >>> DataLoader(Options(), [1, 2]).terminate()
        """
        if self._accessor is not None:
            self._accessor.terminate()

    def __len__(self) -> int:
        """Return the number of batches.

        As in PopTorch it is an estimate in two cases: with iterable datasets it
        ignores what each worker loses; with a batch sampler it counts micro-batches
        or, when rebatching, what the elements of the dataset would fill.
        """
        if self._accessor is None or not hasattr(self, "rebatched_drop_last"):
            return super().__len__()
        num_full, num_remaining = divmod(
            len(self.dataset),  # type: ignore[arg-type]
            self._combined_batch_size or 1,
        )
        return num_full + bool(num_remaining and not self.rebatched_drop_last)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._accessor is not None:  # its process has a copy that shuffles
            return iter(self._accessor)
        if isinstance(self.dataset, Partition):
            self.dataset.shuffle()
        batches: Iterator[Any] = super().__iter__()
        return batches if self._num_joined == 1 else self._join(batches)

    def _join(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Concatenate the micro-batches of each call along dimension 0.

        Leaves that aren't tensors are taken from the first micro-batch.
        """
        while True:
            group = list(itertools.islice(batches, self._num_joined))
            if len(group) < self._num_joined and (self._user_drop_last or not group):
                return
            leaves = [list(flattenTensorStructure(batch, group[0])) for batch in group]
            joined = combine_batch_tensors_gen(leaves)
            yield reconstructTensorStructure(group[0], joined)


def _warn_of_incomplete_group(
    batch_sampler: Any, num_combined: int, drop_last: bool
) -> None:
    # PopTorch warns whatever drop_last is.
    try:
        count: Any = len(batch_sampler)
    except TypeError:
        count = "an unknown number of"
    if isinstance(count, str) or count % num_combined:
        logger.warning(
            "The batch sampler gives %s micro-batches and a call takes %d. An "
            "incomplete last group is %s.",
            count,
            num_combined,
            "dropped" if drop_last else "smaller than the others",
        )


def _warn_of_smaller_batch(size: int, combined: int, num_processes: int) -> None:
    if size % (combined * num_processes):
        logger.warning(
            "The dataset has %d elements, which isn't a multiple of %d = %d per "
            "call (the combined batch size) * %d processes. With drop_last=False "
            "the last batch is smaller, and a model compiled for whole batches "
            "doesn't take it.",
            size,
            combined * num_processes,
            combined,
            num_processes,
        )


class Partition(Dataset[Any]):
    """The block of a dataset that one of several processes reads.

    With `drop_last` all blocks have the same length, a multiple of the combined
    batch, and what is behind the blocks is left over. Otherwise the blocks cover the
    dataset, and the first ones are one element longer if they must.

    With a seed, each `shuffle` draws one permutation of the whole dataset, the same
    in every process, and the block is a block of the permutation. Its offset
    alternates between two places, `leftovers` apart, beginning with the later one.

    As in PopTorch the leftovers of the shuffle are `len(dataset) % length`, which can
    be less than what lies outside the blocks. As there, only the permutation is in
    shared memory: persistent workers keep the offset of their first epoch.

    Args:
        dataset: The whole dataset; needs a length.
        options: The options of this process, with its index and the common seed.
        combined: Elements that one process takes per call; None is refused.
        drop_last: Whether all processes get the same number of full batches.
        is_shuffled: Whether `shuffle` permutes the dataset.

    Raises:
        AssertionError: If there are no batches, or the shuffle has no seed.
        ZeroDivisionError: If `drop_last` leaves nothing to any process.

    Example:
        >>> options = Options()
        >>> _ = options.Distributed.configureProcessId(1, 2)
        >>> block = Partition(
        ...     "abcdefghij", options, 2, drop_last=True, is_shuffled=False
        ... )
        >>> [block[index] for index in range(len(block))]
        ['e', 'f', 'g', 'h']
    """

    def __init__(
        self,
        dataset: Any,
        options: Options,
        combined: int | None,
        *,
        drop_last: bool,
        is_shuffled: bool | None,
    ) -> None:
        require(
            not is_shuffled or options.exists("random_seed"),
            "To shuffle the data of several processes they need a common seed: "
            "call options.randomSeed(seed) in each of them.",
        )
        if combined is None:
            raise AssertionError(
                "Data without batches (batch_size=None) can't be partitioned: pass "
                "auto_distributed_partitioning=False."
            )
        size, index = len(dataset), options.Distributed.processId
        num_processes = options.Distributed.numProcesses
        length, num_longer = divmod(size, num_processes)
        leftovers = 0
        if drop_last:
            per_call = combined * num_processes
            length, num_longer = combined * (size // per_call), 0
            if length == 0:
                raise ZeroDivisionError(
                    f"The dataset has {size} elements, but one call takes {per_call} "
                    f"= {combined} per process * {num_processes} processes. "
                    "Pass more data, a smaller batch, or drop_last=False."
                )
            leftovers = size % length
        start = index * length + min(index, num_longer)
        self._dataset = dataset
        self._length = length + (index < num_longer)
        self._indices: Any = range(start, start + self._length)
        self._offsets = start + leftovers, start  # of this epoch, and of the next
        self._permutation: torch.Tensor | None = None
        self._generator_state: torch.Tensor | None = None
        if is_shuffled:
            generator = torch.Generator().manual_seed(options("random_seed"))
            self._generator_state = generator.get_state()
        # torch asks for it by name, to fetch several elements at once.
        if getattr(dataset, "__getitems__", None):
            self.__getitems__ = self._getitems

    def shuffle(self) -> None:
        """Draw the permutation of the next epoch, if any, and move the block."""
        if self._generator_state is None:
            return
        generator = torch.Generator()
        generator.set_state(self._generator_state)
        permutation = torch.randperm(len(self._dataset), generator=generator)
        self._generator_state = generator.get_state()
        if self._permutation is None:
            permutation.share_memory_()  # type: ignore[no-untyped-call]
            self._permutation = permutation
        else:  # in place: persistent workers see it
            self._permutation.copy_(permutation)
        offset, other = self._offsets
        self._offsets = other, offset
        self._indices = self._permutation.narrow(0, offset, self._length)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[self._source_index(index)]

    def _getitems(self, indices: list[Any]) -> Any:
        return self._dataset.__getitems__([self._source_index(i) for i in indices])

    def _source_index(self, index: Any) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(
                f"Index {int(index)} is outside this process's {self._length} elements."
            )
        return self._indices[index]
