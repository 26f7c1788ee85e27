# SPDX-License-Identifier: Apache-2.0
"""The process behind `AsynchronousDataAccessor`: it reads the dataset ahead.

The two sides talk over one pipe; the tensors are in the ring buffer. Slots are
filled, delivered and released in ring order, so counting the free ones is enough.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import sys
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Iterable, Iterator, NamedTuple, Union

import torch
from torch import Tensor

from ipufit.emulator._ground.custom_args import register_pickled_parsers
from ipufit.emulator._loading.element import ElementStructure
from ipufit.emulator._loading.ring_buffer import RingBuffer, TensorSpec, shared_file
from ipufit.emulator.errors import createPoptorchError


class Begin(NamedTuple):
    """Request: read on beyond the first slot, as the consumer has started."""


class Release(NamedTuple):
    """Request: reuse the slot that was delivered first."""


class Restart(NamedTuple):
    """Request: iterate over the dataset from its beginning."""

    generation: int


class Stop(NamedTuple):
    """Request: end the process."""


class Started(NamedTuple):
    """Reply: the first element was read; the shared file follows."""

    structure: ElementStructure
    specs: list[TensorSpec]


class Ready(NamedTuple):
    """Reply: a slot is filled.

    Attributes:
        num_rows: Number of rows in use; None if the slot is full.
    """

    generation: int
    slot: int
    num_rows: int | None


class EpochEnd(NamedTuple):
    """Reply: the dataset is exhausted.

    Attributes:
        is_idle: Whether the process waits before it reads the next epoch.
    """

    generation: int
    is_idle: bool


class Failed(NamedTuple):
    """Reply: the process ends because of an exception, which it prints."""


Request = Union[Begin, Release, Restart, Stop]
Reply = Union[Started, Ready, EpochEnd, Failed]


class WorkerSetup(NamedTuple):
    """Arguments of the process.

    Attributes:
        dataset: None if it is in a file.
        dataset_path: Path of the file with the pickled dataset.
        num_slots: Number of slots of the ring.
        is_spinning: Whether to poll for requests while the ring is full, not sleep.
        load_indefinitely: Whether to read the next epoch as soon as one ends.
        early_preload: Whether to read on before the consumer starts.
        rebatched_size: Rows to collect in each slot; None leaves elements as they are.
        rng_state: State of torch's generator to continue from.
        parsers: The registered parsers of custom types, pickled.
    """

    dataset: Any
    dataset_path: str | None
    num_slots: int
    is_spinning: bool
    load_indefinitely: bool
    early_preload: bool
    rebatched_size: int | None
    rng_state: bytes
    parsers: list[bytes]


def run_worker(
    connection: Connection, inherited: Connection | None, setup: WorkerSetup
) -> None:
    """Serve one accessor until it stops; the target of the process.

    Args:
        connection: The process's end of the pipe.
        inherited: The accessor's end if forking has copied it. It is closed, or the
            process would never notice that the accessor is gone.
        setup: The other arguments.
    """
    if inherited is not None:
        inherited.close()
    torch.set_num_threads(1)  # as in torch's workers: OpenMP doesn't survive a fork
    if sys.platform == "linux":
        # The dataset's own workers: to fork this process, which has one thread, spares
        # each of them seconds of imports. A loader's `multiprocessing_context` wins.
        multiprocessing.set_start_method("fork", force=True)
    link = _Link(connection, setup.is_spinning)
    # An interrupt, or a consumer that is gone, is no failure of the dataset.
    with contextlib.closing(connection), contextlib.suppress(
        _Stopped, KeyboardInterrupt
    ):
        try:
            _start(link, setup).run()
        except _Stopped:
            raise
        except Exception:
            link.send(Failed())
            raise  # multiprocessing prints it to this process's stderr


_NOTHING = object()


class _Stopped(Exception):
    """The consumer has no more use for this process."""


class _Restarted(Exception):
    """The consumer wants the dataset from its beginning."""


class _Link:
    """The worker's end of the pipe; raises `_Stopped` if the other end is gone."""

    def __init__(self, connection: Connection, is_spinning: bool) -> None:
        self._connection = connection
        self._is_spinning = is_spinning

    def send(self, reply: Reply) -> None:
        try:
            self._connection.send(reply)
        except ConnectionError as error:
            raise _Stopped from error

    def send_file(self, file_descriptor: int) -> None:
        reduction.send_handle(self._connection, file_descriptor, os.getppid())

    def receive(self, *, wait: bool) -> Request | None:
        """Receive the next request; None if there is none yet and `wait` is false."""
        try:
            while not self._connection.poll(0):
                if not wait:
                    return None
                if not self._is_spinning:
                    break
            request: Request = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise _Stopped from error
        return request


def _start(link: _Link, setup: WorkerSetup) -> _Worker:
    """Read the first element, and make a ring of slots like it."""
    register_pickled_parsers(setup.parsers)
    state = torch.frombuffer(bytearray(setup.rng_state), dtype=torch.uint8)
    torch.set_rng_state(state)
    dataset = setup.dataset
    if setup.dataset_path is not None:
        with open(setup.dataset_path, "rb") as file:
            dataset = pickle.load(file)
    elements = iter(dataset)
    first = next(elements, _NOTHING)
    if first is _NOTHING:
        raise createPoptorchError("The dataset is empty.")
    structure = ElementStructure.of(first)
    specs = _slot_specs(structure.tensors(first), setup.rebatched_size)
    file_descriptor = shared_file(specs, setup.num_slots)
    try:
        ring = RingBuffer(file_descriptor, specs, setup.num_slots)
        link.send(Started(structure, specs))
        link.send_file(file_descriptor)
    finally:
        os.close(file_descriptor)
    elements = itertools.chain([first], elements)
    return _Worker(link, setup, dataset, elements, structure, ring)


def _slot_specs(tensors: list[Tensor], rebatched_size: int | None) -> list[TensorSpec]:
    if rebatched_size is None:
        return [TensorSpec(tuple(t.shape), t.dtype) for t in tensors]
    _common_rows(tensors, rebatched_size)
    return [TensorSpec((rebatched_size, *t.shape[1:]), t.dtype) for t in tensors]


class _Worker:
    """Reads the dataset, epoch after epoch, into the free slots of the ring."""

    def __init__(
        self,
        link: _Link,
        setup: WorkerSetup,
        dataset: Any,
        elements: Iterator[Any],
        structure: ElementStructure,
        ring: RingBuffer,
    ) -> None:
        self._link = link
        self._setup = setup
        self._dataset = dataset
        self._elements = elements  # of the epoch
        self._structure = structure
        self._slots = ring.slots
        self._num_free = setup.num_slots
        self._slot = 0
        self._generation = 0
        self._is_held = not setup.early_preload
        self._has_delivered = False

    def run(self) -> None:
        """Read until `_Stopped`, or an exception of the dataset."""
        while True:
            with contextlib.suppress(_Restarted):
                self._run_epoch()
            # The iterator's own processes end before the dataset starts others.
            self._elements = iter(())
            self._elements = iter(self._dataset)

    def _run_epoch(self) -> None:
        fill = (
            self._fill if self._setup.rebatched_size is None else self._fill_rebatched
        )
        self._has_delivered = False
        self._wait_for_slot()
        fill(self._elements)
        # An epoch without data isn't repeated unasked: that would never pause.
        is_idle = not (self._setup.load_indefinitely and self._has_delivered)
        self._link.send(EpochEnd(self._generation, is_idle))
        while is_idle:
            self._handle(self._link.receive(wait=True))

    def _fill(self, elements: Iterable[Any]) -> None:
        """Fill each slot with one element."""
        for element in elements:
            sources = self._structure.tensors(element)
            for target, source in zip(self._slots[self._slot], sources):
                target.copy_(source)
            self._deliver(None)
            self._wait_for_slot()

    def _fill_rebatched(self, elements: Iterable[Any]) -> None:
        """Fill each slot with rows of as many elements as it takes."""
        size = self._setup.rebatched_size or 0
        num_filled = 0
        for element in elements:
            sources = self._structure.tensors(element)
            num_rows = _common_rows(sources, size)
            num_taken = 0
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
        if num_filled and not getattr(self._dataset, "rebatched_drop_last", True):
            self._deliver(num_filled)

    def _deliver(self, num_rows: int | None) -> None:
        self._link.send(Ready(self._generation, self._slot, num_rows))
        self._has_delivered = True
        self._num_free -= 1
        self._slot = (self._slot + 1) % self._setup.num_slots
        while self._is_held:
            self._handle(self._link.receive(wait=True))

    def _wait_for_slot(self) -> None:
        """Handle pending requests, and wait until a slot is free."""
        request = self._link.receive(wait=False)
        while request is not None or self._num_free == 0:
            self._handle(request)
            request = self._link.receive(wait=self._num_free == 0)

    def _handle(self, request: Request | None) -> None:
        if isinstance(request, Release):
            self._num_free += 1
        elif isinstance(request, Begin):
            self._is_held = False
        elif isinstance(request, Restart):
            self._generation = request.generation
            raise _Restarted
        elif isinstance(request, Stop):
            raise _Stopped


def _common_rows(tensors: list[Tensor], limit: int) -> int:
    """Number of rows of an element that is to be rebatched.

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
