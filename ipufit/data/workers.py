# SPDX-License-Identifier: Apache-2.0
"""Processes that load samples."""

from __future__ import annotations

import itertools
import os
import tempfile
import traceback
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    _utils,
    get_worker_info,
)

from ipufit._poptorch import poptorch
from ipufit.errors import DataError

Slots = Dict[Tuple[int, int], List[Tensor]]
"""Shared tensors by the number of the process that loads and that of the slot."""


class Carrier:
    """A collate function whose batches come out of processes in reused memory.

    A process that loads has a few slots, and copies one batch after the other into
    them. Only the first batch of each slot brings its memory along. The process that
    waits copies each batch when it arrives, so a slot is free again before its process
    gets another batch to load. Batches themselves don't change. One that has other
    shapes than its slot comes as torch brings it.

    In the process that waits, the carrier must live as long as the loader's iterator.
    torch's iterators keep their collate function, which is this.

    Args:
        collate: Makes a batch of samples.
        num_slots: Number of batches of one process that may be on the way.
    """

    def __init__(self, collate: Callable[[Any], Any], num_slots: int) -> None:
        self.__setstate__((collate, num_slots, uuid.uuid4().hex))

    def __getstate__(self) -> tuple[Any, int, str]:
        return self._collate, self._num_slots, self._name

    def __setstate__(self, state: tuple[Any, int, str]) -> None:
        self._collate, self._num_slots, self._name = state
        self._slots: Slots = {}
        self._num_carried = 0
        _carriers[self._name] = self

    def __call__(self, samples: Any) -> Any:
        """Make the batch of some samples.

        Returns:
            The batch; in a process that loads mostly an object that becomes the batch
            where it is unpickled.
        """
        batch = self._collate(samples)
        info: Any = get_worker_info()
        if info is None:
            return batch
        leaves: list[Tensor] = []
        rest = _taken_out(batch, leaves)
        if not leaves:
            return batch
        at = info.id, self._num_carried % self._num_slots
        is_new = at not in self._slots
        if is_new:
            self._slots[at] = [_shared_like(leaf) for leaf in leaves]
        slot = self._slots[at]
        if not _are_alike(slot, leaves):
            return batch
        self._num_carried += 1
        for place, leaf in zip(slot, leaves):
            place.copy_(leaf)
        return _OnTheWay(self._name, at, slot if is_new else None, rest)

    def arrived(self, at: tuple[int, int], slot: list[Tensor] | None) -> list[Tensor]:
        """Copies of the tensors in a slot.

        Args:
            at: Number of the process and of the slot.
            slot: Memory of the slot, if it is a new one.
        """
        if slot is not None:
            self._slots[at] = slot
        return [shared.clone() for shared in self._slots[at]]


_carriers: WeakValueDictionary[str, Carrier] = WeakValueDictionary()


def carried(loader: Any) -> Iterator[Any]:
    """Begin a loader's pass; the batches of its processes come in reused memory.

    The loader itself doesn't change. Its batches are those of `iter(loader)`.

    Args:
        loader: Any iterable. Only torch's and PopTorch's own loaders that begin to load
            in other processes are treated otherwise than by `iter`.

    Example:
        >>> [batch.tolist() for batch in carried(DataLoader([1, 2, 3], 2))]
        [[1, 2], [3]]
    """
    if type(loader) not in (DataLoader, poptorch.DataLoader) or not loader.num_workers:
        return iter(loader)
    users = loader.collate_fn
    loader.collate_fn = Carrier(users, slots_of(loader))
    try:
        return iter(loader)
    finally:
        loader.collate_fn = users


def slots_of(loader: Any) -> int:
    """Number of batches of one process that may be on the way, and one more.

    A process has up to `prefetch_factor` batches to load. When others have come to the
    end of their part of a stream, it has theirs, too.
    """
    is_stream = isinstance(loader.dataset, IterableDataset)
    return (loader.prefetch_factor or 0) * (loader.num_workers if is_stream else 1) + 1


class _Leaf(NamedTuple):
    """The place of a tensor in a batch."""

    number: int


class _OnTheWay:
    """A batch in a slot. When it is unpickled, it is the batch itself."""

    def __init__(
        self, name: str, at: tuple[int, int], slot: list[Tensor] | None, rest: Any
    ) -> None:
        self._arguments = name, at, slot, rest

    def __reduce__(self) -> Any:
        return _arrived, self._arguments


def _arrived(name: str, at: tuple[int, int], slot: Any, rest: Any) -> Any:
    return _put_back(rest, _carriers[name].arrived(at, slot))


def _shared_like(leaf: Tensor) -> Any:
    shared: Any = torch.empty_like(leaf)
    shared.share_memory_()
    return shared


def _are_alike(slot: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
    return len(slot) == len(leaves) and all(
        shared.shape == leaf.shape
        and shared.dtype == leaf.dtype
        and shared.stride() == leaf.stride()
        for shared, leaf in zip(slot, leaves)
    )


def _taken_out(value: Any, leaves: list[Tensor]) -> Any:
    """The value with a `_Leaf` in the place of each plain tensor."""
    if type(value) is Tensor:
        if not _is_plain(value):
            return value
        leaves.append(value)
        return _Leaf(len(leaves) - 1)
    return _mapped(value, lambda element: _taken_out(element, leaves))


def _put_back(value: Any, leaves: Sequence[Tensor]) -> Any:
    if type(value) is _Leaf:
        return leaves[value.number]
    return _mapped(value, lambda element: _put_back(element, leaves))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Lists, tuples and dicts with other elements; what is neither stays."""
    if type(value) in (list, tuple):
        return type(value)([change(element) for element in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[change(element) for element in value])
    if type(value) is dict:
        return {key: change(element) for key, element in value.items()}
    return value


def _is_plain(tensor: Tensor) -> bool:
    """Whether a copy in shared memory is all there is to a tensor."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_complex()
        and not tensor.is_quantized
        and tensor.is_contiguous()
    )


class ErrorReport:
    """Keeps the traceback of an error in another process, until somebody takes it.

    It is kept in a file, which exists only in between.

    Example:
        >>> report = ErrorReport()
        >>> rows = ReportedRows([1, 2], report)
        >>> try:
        ...     rows[2]
        ... except IndexError:
        ...     print(report.take().splitlines()[-1])
        IndexError: list index out of range
        >>> report.take()
        ''
    """

    def __init__(self) -> None:
        self._path = Path(tempfile.gettempdir(), f"ipufit-{uuid.uuid4().hex}.txt")

    def calling(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, and keep the traceback if it raises an error."""
        try:
            return function(*arguments)
        except Exception:
            with os.fdopen(
                os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600),
                "w",
                encoding="utf-8",
            ) as file:
                file.write(traceback.format_exc())
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
    """A map-style dataset whose errors are reported.

    Args:
        report: Gets the traceback of an error.
    """

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
        together = getattr(self.dataset, "__getitems__", None)
        if together is None:
            return [self[index] for index in indices]
        return self.report.calling(together, indices)


@dataclass(frozen=True, eq=False)
class WorkerSamples(IterableDataset):  # type: ignore[type-arg]
    """The samples that one loading process gives, of all.

    A dataset that asks for the number of its process before its first sample divides
    itself. Of any other, a process keeps every n-th sample.

    Args:
        dataset: The user's iterable dataset.
        name: Name of the data in error messages.
    """

    dataset: Any
    name: str = "x"

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        if info is None or info.num_workers == 1:
            yield from self.dataset
            return
        noted = _NotedInfo(info, self.dataset)
        worker: Any = _utils.worker
        worker._worker_info = noted
        try:
            yield from self._of_one_worker(noted, info)
        finally:
            worker._worker_info = info

    def _of_one_worker(self, noted: _NotedInfo, info: Any) -> Iterator[Any]:
        samples = iter(self.dataset)
        first = list(itertools.islice(samples, 1))
        if noted.was_asked:
            yield from first
            yield from samples
            return
        for number, sample in enumerate(itertools.chain(first, samples)):
            if noted.was_asked:
                raise DataError(
                    f"`{self.name}` asks get_worker_info() which process loads it "
                    "only after its first sample, when samples are divided already. "
                    "Ask at the beginning of __iter__."
                )
            if number % info.num_workers == info.id:
                yield sample


class _NotedInfo:
    """A stand-in for what `get_worker_info()` gives, which notes whether it is read.

    Args:
        info: The one of torch.
        dataset: The user's dataset, which torch has a wrapper of.
    """

    def __init__(self, info: Any, dataset: Any) -> None:
        self._info = info
        self.dataset = dataset
        self.was_asked = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the info, for `isinstance`."""
        return type(self._info)

    @property
    def id(self) -> int:
        """Number of the process that loads."""
        self.was_asked = True
        return int(self._info.id)

    @property
    def num_workers(self) -> int:
        """Number of processes that load."""
        self.was_asked = True
        return int(self._info.num_workers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)
