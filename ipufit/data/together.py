# SPDX-License-Identifier: Apache-2.0
"""Takes several samples of a dataset at once, where it has `__getitems__`."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence

from torch.utils.data import Subset

from .host_random import HostRandomState
from .seeds import seed_all

_Items = List[Any]


class TogetherReader:
    """Reads samples by `__getitems__` if that gives what `__getitem__` gives.

    The first batch is read both ways, and so is a larger one. Both must give the same
    samples. `__getitems__` must draw no random numbers, because it would draw them in
    another order, or with other seeds. A dataset that fails in either is read sample by
    sample from then on.

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
        ...     singly = lambda: [numbers[index] for index in indices]
        ...     return reader.items(indices, singly, lambda a, b: a == b)
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
        singly: Callable[[], _Items],
        are_same: Callable[[_Items, _Items], bool],
    ) -> _Items:
        """The samples of some indices.

        Args:
            indices: Indices of the samples.
            singly: Reads the samples one by one.
            are_same: Tells whether two lists of samples are the same.
        """
        together = together_of(self._dataset) if self._is_used else None
        if together is None or len(indices) == 1:
            return singly()
        if len(indices) > self._num_tried:
            items = singly()
            self._num_tried = len(indices)
            self._is_used = _gives(together, indices, items, are_same)
            return items
        before = HostRandomState()
        items = together(indices)
        if len(items) == len(indices) and not before.has_changed():
            return items
        before.put_back()
        self._is_used = False
        return singly()


def _gives(
    together: Callable[[Sequence[int]], _Items],
    indices: Sequence[int],
    items: _Items,
    are_same: Callable[[_Items, _Items], bool],
) -> bool:
    """Whether samples that are read together are those that were read singly."""
    now = HostRandomState()
    seed_all(0)  # other than what the last sample was read with
    before = HostRandomState()
    try:
        others = together(indices)
        return not before.has_changed() and are_same(items, others)
    except Exception:  # noqa: BLE001 - a method of the user's may raise anything
        return False
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
