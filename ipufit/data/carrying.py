# SPDX-License-Identifier: Apache-2.0
"""Brings batches out of processes that load, in memory that is used again.

torch gives the tensors of each batch new shared memory, and asks the process that made
it for each of them over a connection of its own. For small batches that takes longer
than loading them.
"""

from __future__ import annotations

import uuid
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ipufit._poptorch import poptorch

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
