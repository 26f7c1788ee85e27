# SPDX-License-Identifier: Apache-2.0
"""An iterator over data that a background process loads ahead.

The two processes talk over one pipe. The tensors are in a ring of slots in shared
memory. Slots are filled, delivered and released in the order of the ring, so each side
only counts the free slots.
"""

from __future__ import annotations

import atexit
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
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Iterator, NamedTuple, Sequence, Tuple, Union

import torch
import torch.utils.data
from torch import Tensor

from ipufit.emulator._ground.custom_args import (
    custom_arg_parser,
    flattenTensorStructure,
    pickled_parsers,
    reconstructTensorStructure,
    register_pickled_parsers,
)
from ipufit.emulator.enums import SharingStrategy
from ipufit.emulator.errors import createPoptorchError, require

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
        self._process: Any = None
        if isinstance(dataset, torch.utils.data.DataLoader):
            # By attributes: the module `dataloader` imports this one.
            if getattr(dataset, "_accessor", None) is not None:
                raise createPoptorchError(
                    "An AsynchronousDataAccessor needs a DataLoader with "
                    "mode=DataLoaderMode.Sync: in the other modes it already has an "
                    "accessor."
                )
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
        self._num_held = 0
        self._owner = os.getpid()
        context: Any = multiprocessing.get_context(_START_METHODS[sharing_strategy])
        worker = _Worker(
            buffer_size,
            rebatched_size,
            load_indefinitely=load_indefinitely,
            early_preload=early_preload,
        )
        if sharing_strategy == SharingStrategy.FileSystem:
            # By value: multiprocessing would move its tensors to shared memory.
            dataset = pickle.dumps(dataset, protocol=4)
        self._connection, theirs = context.Pipe()
        is_fork = sharing_strategy == SharingStrategy.Fork
        inherited = self._connection if is_fork else None
        process = context.Process(
            target=worker.serve, args=(theirs, inherited, dataset)
        )
        try:
            process.start()
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()
        self._process = process
        # The handler runs before multiprocessing's own, which would wait for ever,
        # because it is registered after that.
        atexit.unregister(_terminate_all)
        atexit.register(_terminate_all)
        _accessors.add(self)
        try:
            self._receive_start()
        except BaseException:
            self.terminate()
            raise

    def _receive_start(self) -> None:
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
        file_descriptor = reduction.recv_handle(self._connection)
        try:
            self._slots = slots_of(file_descriptor, specs, self._num_slots)
        finally:
            os.close(file_descriptor)

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
        # A forked copy of this process must not end the worker.
        if self._process is None or self._owner != os.getpid():
            return
        process, self._process = self._process, None
        self._slots = []  # the memory stays for as long as there are elements
        self._send(_STOP)
        self._connection.close()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            process.join(_PATIENCE_SECONDS)
            if process.is_alive():
                os.kill(process.pid, number)
        process.join()
        process.close()

    def __del__(self) -> None:
        self.terminate()

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
        self._process.join(_LIVENESS_PERIOD_SECONDS)  # it prints, then ends
        return (
            "Look above for what it printed to its stderr (exit code "
            f"{self._process.exitcode})."
        )

    def _release(self, count: int) -> None:
        for _ in range(count):
            self._send(_RELEASE)
        self._num_held = 0

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
        if self._num_slots == 1:  # nothing can be read ahead while it's held
            self._release(self._num_held)
        while True:
            reply = self._receive()
            if reply is None:
                raise AssertionError(
                    "An error occurred in the data fetcher, the process that reads the "
                    f"dataset. {self._failure()}"
                )
            if reply.generation == self._generation:
                break
            if reply.slot is not None:  # from before a restart
                self._release(self._num_held + 1)
        self._must_restart = reply.slot is not None or reply.is_idle
        if reply.slot is None:
            self._is_at_end = True
            raise StopIteration
        self._release(self._num_held)
        self._num_held = 1
        # A view of its own for each turn: the caller may resize or retype it.
        tensors = [tensor.view(tensor.shape) for tensor in self._slots[reply.slot]]
        if reply.num_rows is not None:
            tensors = [tensor.narrow(0, 0, reply.num_rows) for tensor in tensors]
        return reconstructTensorStructure(self._like, tensors)

    def _require_process(self) -> None:
        require(
            self._process is not None,
            "This AsynchronousDataAccessor was terminated: make a new one.",
        )


_accessors: weakref.WeakSet[AsynchronousDataAccessor] = weakref.WeakSet()


def _terminate_all() -> None:
    for accessor in list(_accessors):
        accessor.terminate()


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
    is_custom = custom_arg_parser(element, exact=True) is not None
    if isinstance(element, (dict, list, tuple)) and not is_custom:
        members = element.values() if isinstance(element, dict) else element
        if all(isinstance(member, Tensor) for member in members):
            is_custom = True
            element = dict(element) if isinstance(element, dict) else list(element)
    if not (is_custom or isinstance(element, Tensor)):
        raise createPoptorchError(
            "An element must be a tensor, a flat list, tuple or dict of tensors, "
            f"or of a type with a registered parser; got {_describe(element)}."
        )
    return reconstructTensorStructure(element, itertools.repeat(torch.empty(0)))


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


def _num_bytes(spec: Spec) -> int:
    shape, dtype = spec
    size: int = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    return size


def _starts(specs: Sequence[Spec]) -> list[int]:
    """Return where each tensor of a slot begins, and at the end the size of a slot."""
    sizes = (-(-_num_bytes(spec) // 64) * 64 for spec in specs)  # whole cache lines
    return [0, *itertools.accumulate(sizes)]


def shared_file(specs: Sequence[Spec], num_slots: int) -> int:
    """Create a shared file for a ring of slots, and return its descriptor.

    The caller closes the descriptor. The file has no name: it is deleted when no
    process and no tensor uses it any more.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("poptorch_ring_buffer")
    else:  # not Linux
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    # An empty file can't be mapped.
    os.truncate(descriptor, num_slots * _starts(specs)[-1] or 1)
    return descriptor


def slots_of(
    file_descriptor: int, specs: Sequence[Spec], num_slots: int
) -> list[list[Tensor]]:
    """Map a shared file, and return the tensors of each slot.

    Example:
        >>> specs = [((2,), torch.float32)]
        >>> descriptor = shared_file(specs, num_slots=3)
        >>> writer, reader = (slots_of(descriptor, specs, 3) for _ in range(2))
        >>> os.close(descriptor)
        >>> _ = writer[1][0].fill_(7.0)
        >>> reader[1]
        [tensor([7., 7.])]
    """
    memory: Any = mmap.mmap(file_descriptor, 0)  # the tensors keep it alive
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    *starts, size = _starts(specs)
    return [
        [
            flat.narrow(0, slot * size + start, _num_bytes(spec))
            .view(spec[1])
            .view(spec[0])
            for start, spec in zip(starts, specs)
        ]
        for slot in range(num_slots)
    ]


# The process --------------------------------------------------------------------


class _Stopped(Exception):
    """Raised when the consumer no longer needs this process."""


class _Restarted(Exception):
    """Raised when the consumer asks for the dataset from its beginning."""


class _Worker:
    """Reads the dataset, epoch after epoch, into the free slots of the ring.

    Args:
        num_slots: Number of slots of the ring.
        rebatched_size: Rows to collect in each slot; None leaves elements as they are.
        load_indefinitely: Whether to read the next epoch as soon as one ends.
        early_preload: Whether to fill the ring before the consumer starts.
    """

    def __init__(
        self,
        num_slots: int,
        rebatched_size: int | None,
        *,
        load_indefinitely: bool,
        early_preload: bool,
    ) -> None:
        self._num_slots = self._num_free = num_slots
        self._rebatched_size = rebatched_size
        self._load_indefinitely = load_indefinitely
        self._is_held = not early_preload
        self._rng_state = torch.get_rng_state().numpy().tobytes()
        self._parsers = pickled_parsers()
        self._slot = 0
        self._generation = 0
        self._has_delivered = False

    def serve(
        self,
        connection: Connection,
        inherited: Connection | None,
        dataset: Any,
    ) -> None:
        """Serve one accessor until it stops; the target of the process.

        Args:
            connection: The process's end of the pipe.
            inherited: The consumer's end of the pipe if forking has copied it. It is
                closed, or the process wouldn't notice that the consumer has ended.
            dataset: The dataset, or its pickle.
        """
        if inherited is not None:
            inherited.close()
        torch.set_num_threads(1)  # as torch's workers: OpenMP doesn't survive a fork
        if sys.platform == "linux":
            # The dataset's own workers: to fork this process, which has one thread,
            # spares each of them seconds of imports. A loader's
            # `multiprocessing_context` wins.
            multiprocessing.set_start_method("fork", force=True)
        self._connection = connection
        # An interrupt, or a consumer that is gone, is no failure of the dataset.
        with contextlib.closing(connection), contextlib.suppress(
            _Stopped, KeyboardInterrupt
        ):
            try:
                self._run(dataset)
            except _Stopped:
                raise
            except Exception:
                self._send(None)
                raise  # multiprocessing prints it to this process's stderr

    def _run(self, dataset: Any) -> None:
        """Read until `_Stopped`, or an exception of the dataset."""
        register_pickled_parsers(self._parsers)
        state = torch.frombuffer(bytearray(self._rng_state), dtype=torch.uint8)
        torch.set_rng_state(state)
        if isinstance(dataset, bytes):
            dataset = pickle.loads(dataset)
        elements = self._begin(iter(dataset))
        while True:
            with contextlib.suppress(_Restarted):
                self._run_epoch(dataset, elements)
            # The iterator's own processes end before the dataset starts others.
            elements = iter(())
            elements = iter(dataset)

    def _begin(self, elements: Iterator[Any]) -> Iterator[Any]:
        """Read the first element, and make slots of its shapes and types."""
        first = next(elements, self)
        if first is self:
            raise createPoptorchError("The dataset is empty.")
        self._like = _skeleton(first)
        tensors = _tensors_of(first, self._like)
        specs = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        size = self._rebatched_size
        if size is not None:
            _common_rows(tensors, size)
            specs = [((size, *shape[1:]), dtype) for shape, dtype in specs]
        file_descriptor = shared_file(specs, self._num_slots)
        try:
            self._slots = slots_of(file_descriptor, specs, self._num_slots)
            self._send((self._like, specs))
            reduction.send_handle(self._connection, file_descriptor, os.getppid())
        finally:
            os.close(file_descriptor)
        return itertools.chain([first], elements)

    def _run_epoch(self, dataset: Any, elements: Iterator[Any]) -> None:
        """Fill slots with one element each, or with `rebatched_size` rows each."""
        size, num_filled = self._rebatched_size, 0
        self._has_delivered = False
        self._wait_for_slot()
        for element in elements:
            sources = _tensors_of(element, self._like)
            if size is None:
                for target, source in zip(self._slots[self._slot], sources):
                    target.copy_(source)
                self._deliver(None)
                self._wait_for_slot()
                continue
            num_rows, num_taken = _common_rows(sources, size), 0
            while num_taken < num_rows:
                count = min(num_rows - num_taken, size - num_filled)
                for target, source in zip(self._slots[self._slot], sources):
                    rows = source.narrow(0, num_taken, count)
                    target.narrow(0, num_filled, count).copy_(rows)
                num_taken += count
                num_filled += count
                if num_filled == size:
                    self._deliver(None)
                    self._wait_for_slot()
                    num_filled = 0
        if num_filled and not getattr(dataset, "rebatched_drop_last", True):
            self._deliver(num_filled)
        # An epoch without data isn't repeated unasked: that would never pause.
        is_idle = not (self._load_indefinitely and self._has_delivered)
        self._send(Reply(self._generation, is_idle=is_idle))
        while is_idle:
            self._receive(wait=True)

    def _deliver(self, num_rows: int | None) -> None:
        self._send(Reply(self._generation, self._slot, num_rows))
        self._has_delivered = True
        self._num_free -= 1
        self._slot = (self._slot + 1) % self._num_slots
        while self._is_held:
            self._receive(wait=True)

    def _wait_for_slot(self) -> None:
        """Handle pending requests, and wait until a slot is free."""
        while self._receive(wait=self._num_free == 0):
            pass

    def _send(self, reply: Any) -> None:
        """Send a reply, or None if this process fails."""
        try:
            self._connection.send(reply)
        except ConnectionError as error:
            raise _Stopped from error

    def _receive(self, *, wait: bool) -> bool:
        """Handle the next request, and return whether there was one.

        Raises:
            _Restarted: The consumer asks for a restart.
            _Stopped: The consumer asks for the end, or has ended.
        """
        try:
            if not wait and not self._connection.poll(0):
                return False
            request: Request = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise _Stopped from error
        if request == _STOP:
            raise _Stopped
        if request == _RELEASE:
            self._num_free += 1
            return True
        self._is_held = False
        if request != self._generation:
            self._generation = int(request)
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
