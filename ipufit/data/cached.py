# SPDX-License-Identifier: Apache-2.0
"""Keeps the samples of a map-style dataset in memory."""

from __future__ import annotations

import operator
from typing import Any, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ipufit._tree import Structure
from ipufit.batching import check_count
from ipufit.errors import DataError

from .filling import filled
from .values import dense_tensor


class CachedDataset(Dataset):  # type: ignore[type-arg]
    """The samples of a dataset, computed once and kept in memory.

    Decoding and transforms run once instead of in every epoch. `fit`, `evaluate` and
    `predict` gather the samples by index, as they do arrays, and give the same numbers
    as with the dataset itself. The cache is a dataset of torch's, too.

    It is filled when it is made, not in the first epoch. A cache that fills while it is
    used would be filled in each process that loads, and stay empty in this one.

    All samples are stacked, so that the cache takes their number times the bytes of
    one. Tensors and arrays keep their type; numbers become int64, float32 or bool
    tensors without axes. The dataset itself isn't kept. A `TensorDataset` or another
    `CachedDataset` is in memory already, and is taken without a copy.

    Random transforms are refused, because a cache would freeze them. To find them, up
    to 16 samples, spread over the dataset, are computed twice, with the random numbers
    of Python, NumPy and torch seeded differently. If any were drawn, all samples are
    computed twice. Apply such transforms in a dataset around the cache. The caller's
    random states don't change.

    Args:
        dataset: Has `__len__` and `__getitem__`. Samples nest in tuples, lists and
            dicts, and are tensors, arrays or numbers of one shape and type.
        num_workers: Number of processes that compute samples; 0 to use this one.

    Raises:
        ConfigError: `num_workers` is not a whole number of 0 or more.
        DataError: The dataset is a stream or has no samples; or its samples can't be
            stacked, aren't the same each time, or don't fit into memory.

    Example:
        >>> from torch.utils.data import Dataset
        >>> class Squares(Dataset):
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, index):  # imagine it were slow
        ...         return torch.full((2,), float(index)), index**2
        >>> cached = CachedDataset(Squares())
        >>> len(cached), cached[3]
        (4, (tensor([3., 3.]), tensor(9)))
        >>> x, y = cached.stacked
        >>> x.shape, y
        (torch.Size([4, 2]), tensor([0, 1, 4, 9]))
    """

    def __init__(self, dataset: Any, num_workers: int = 0) -> None:
        check_count("num_workers", num_workers)
        self._structure: Structure
        self._tensors: list[Tensor]
        if type(dataset) is CachedDataset:
            self._structure, self._tensors = dataset._structure, dataset._tensors
            return
        require_map_style(dataset)
        if not len(dataset):
            raise DataError("`dataset` has no samples.")
        if type(dataset) is TensorDataset:  # a subclass may do more
            self._structure = Structure.of(dataset.tensors)
            self._tensors = [dense_tensor(t, "`dataset`") for t in dataset.tensors]
        else:
            self._structure, self._tensors = filled(dataset, num_workers)

    @property
    def stacked(self) -> Any:
        """All samples, nested as one is, with leaves `[num_samples, ...]`.

        The leaves are the cache's own memory, not a copy.
        """
        return self._structure.rebuild(self._tensors)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> Any:
        """A copy of one sample; a negative index counts from the end.

        Raises:
            IndexError: There is no such sample.
        """
        at = int(operator.index(index))  # a bool is still one on Python 3.8
        if not -len(self) <= at < len(self):
            raise IndexError(f"There is no sample {at}: there are {len(self)}.")
        return self._structure.rebuild(tensor[at].clone() for tensor in self._tensors)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Copies of several samples: torch's loaders use this method if it exists."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        leaves = [tensor[rows].unbind() for tensor in self._tensors]
        return [self._structure.rebuild(sample) for sample in zip(*leaves)]


def require_map_style(dataset: Any) -> None:
    """Refuse what has no samples that are taken by index.

    Raises:
        DataError: `dataset` is no map-style dataset.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"`dataset` is a stream ({kind}), whose samples have no index. Make a "
            "map-style dataset of it: list(dataset) is one, if it ends."
        )
    is_indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_indexed or isinstance(dataset, (str, bytes, dict)):
        raise DataError(
            f"`dataset` is a {kind}: pass a map-style dataset of samples, with "
            "__len__ and __getitem__; of a loader its `dataset`."
        )
