# SPDX-License-Identifier: Apache-2.0
"""Takes several samples of a dataset at once, where it has `__getitems__`."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence

from torch.utils.data import Subset

from .host_random import HostRandomState
from .seeds import seed_all

_Items = List[Any]

_MOST_COMPARED = 32
"""Samples of a batch that are read both ways: a call may have thousands of them."""


class TogetherReader:
    """Reads samples by `__getitems__` if that gives what `__getitem__` gives.

    Of the first batch, and of each that is larger than those before, up to 32 samples
    are read both ways. Both must give the same. `__getitems__` must draw no random
    numbers, because it would draw them in another order, or with other seeds. A dataset
    that fails in either is read sample by sample from then on.

    Args:
        dataset: The user's map-style dataset.

    Example:
        >>> class Numbers(list):
        ...     def __getitems__(self, indices):
        ...         print("together")
        ...         return [self[index] for index in indices]
        >>> numbers = Numbers([5, 6, 7])
        >>> reader = TogetherReader(numbers)
        >>> def read(indices):
        ...     singly = lambda places: [numbers[indices[at]] for at in places]
        ...     return reader.items(indices, singly, lambda places, a, b: a == b)
        >>> read([0, 1])
        together
        [5, 6]
        >>> read([2, 1])
        together
        [7, 6]
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._num_tried = 1  # a batch of one sample says nothing
        self._is_used = together_of(dataset) is not None

    def items(
        self,
        indices: Sequence[int],
        singly: Callable[[Sequence[int]], _Items],
        are_same: Callable[[Sequence[int], _Items, _Items], bool],
    ) -> _Items:
        """The samples of some indices.

        Args:
            indices: Indices of the samples.
            singly: Reads samples one by one, those at some places among the indices.
            are_same: Tells whether two lists of samples are the same, both of those at
                some places.
        """
        places = range(len(indices))
        together = together_of(self._dataset) if self._is_used else None
        if together is None or len(indices) == 1:
            return singly(places)
        before = HostRandomState()
        if len(indices) > self._num_tried:
            self._num_tried = len(indices)
            compared = _compared(len(indices))
            some = singly(compared)
            items = _others(together, indices, compared, some, are_same)
            self._is_used = items is not None
            if len(some) == len(indices):
                return some
        else:
            items = together(indices)
            self._is_used = len(items) == len(indices) and not before.has_changed()
        if items is not None and self._is_used:
            return items
        before.put_back()
        return singly(places)


def _compared(count: int) -> Sequence[int]:
    """Places of samples to compare, from the first to the last of a batch."""
    if count <= _MOST_COMPARED:
        return range(count)
    return [at * (count - 1) // (_MOST_COMPARED - 1) for at in range(_MOST_COMPARED)]


def _others(
    together: Callable[[Sequence[int]], _Items],
    indices: Sequence[int],
    places: Sequence[int],
    some: _Items,
    are_same: Callable[[Sequence[int], _Items, _Items], bool],
) -> _Items | None:
    """Samples that are read together; None unless they are those read singly.

    Args:
        together: The `__getitems__` of the dataset.
        indices: Indices of the samples.
        places: Places among the indices whose samples are compared.
        some: Samples at these places that were read singly.
        are_same: As for `TogetherReader.items`.
    """
    now = HostRandomState()
    seed_all(0)  # other than what the last sample was read with
    before = HostRandomState()
    try:
        items = together(indices)
        if len(items) != len(indices) or before.has_changed():
            return None
        return items if are_same(places, some, [items[at] for at in places]) else None
    except Exception:  # noqa: BLE001 - a method of the user's may raise anything
        return None
    finally:
        now.put_back()


def together_of(dataset: Any) -> Callable[[Sequence[int]], _Items] | None:
    """The method that reads several samples at once; None if there is none to trust.

    A `Subset` reads those of its dataset. A class that has its own `__getitem__` and
    inherits `__getitems__` would be passed over by the latter.
    """
    if type(dataset) is Subset:
        inner, chosen = together_of(dataset.dataset), dataset.indices
        if inner is None:
            return None
        read = inner
        return lambda indices: read([chosen[index] for index in indices])
    together = getattr(dataset, "__getitems__", None)
    if not callable(together) or isinstance(dataset, Subset):
        return None
    mro = type(dataset).__mro__
    definers = [
        next((at for at, kind in enumerate(mro) if name in vars(kind)), len(mro))
        for name in ("__getitems__", "__getitem__")
    ]
    return together if definers[0] <= definers[1] else None
