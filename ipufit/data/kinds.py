# SPDX-License-Identifier: Apache-2.0
"""Tells which kind of data a user has given."""

from __future__ import annotations

from typing import Any, Iterable, Mapping

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from ipufit._poptorch import poptorch

from .columns import is_frame

_SAMPLERS = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def is_array_like(x: Any) -> bool:
    """Whether `x` is an array, a frame, or arrays and frames nested."""
    return (
        isinstance(x, (Tensor, np.ndarray))
        or is_frame(x)
        or (isinstance(x, (tuple, list, Mapping)) and len(x) > 0)
    )


def is_indexed(x: Any) -> bool:
    """Whether `x` is a dataset whose samples are taken by index."""
    if isinstance(x, (IterableDataset, DataLoader)):
        return False
    is_dataset = isinstance(x, Dataset) or is_hugging_face(x)
    return is_dataset and hasattr(x, "__len__") and hasattr(x, "__getitem__")


def is_hugging_face(x: Any) -> bool:
    """Whether `x` looks like a dataset of Hugging Face, whose samples are dicts.

    Example:
        >>> is_hugging_face([{"a": 1}])
        False
    """
    return hasattr(x, "column_names") and hasattr(x, "features")


def is_stream(x: Any) -> bool:
    """Whether `x` is an iterable, but no collection of arrays."""
    return isinstance(x, Iterable) and not isinstance(
        x, (str, bytes, set, frozenset, tuple, list, Mapping)
    )


def batch_size_of(x: Any) -> int | None:
    """The batch size of the user's loader: the samples of one update."""
    if isinstance(x, poptorch.DataLoader):
        combined = x.combinedBatchSize
        return None if combined is None else combined // x.options.device_iterations
    size = getattr(x, "batch_size", None)
    return size if isinstance(size, int) else None


def length_of(x: Any) -> int | None:
    """The number of samples that a torch loader will give; None if unknown."""
    if not isinstance(x, DataLoader) or isinstance(x.dataset, IterableDataset):
        return None
    kind = type(x.batch_sampler)
    is_known = kind is BatchSampler or kind.__module__.startswith("torchdata.")
    if x.batch_size is None or not is_known:
        return None  # a sampler of batches needn't give all of one size
    if isinstance(x, poptorch.DataLoader) or not hasattr(x.sampler, "__len__"):
        return None
    sampler: Any = x.sampler
    count = len(sampler)
    return count - count % x.batch_size if x.drop_last else count


def gives_what_it_says(x: Any) -> bool:
    """Whether the number that `length_of` gives of a loader is certain.

    It isn't where code of the user's may give more or fewer samples: a collate function
    that leaves some out, a sampler, or a loader of another class.

    Example:
        >>> loader = DataLoader(range(8), batch_size=4)
        >>> gives_what_it_says(loader)
        True
        >>> loader.collate_fn = list
        >>> gives_what_it_says(loader)
        False
    """
    return (
        type(x) is DataLoader
        and type(x.sampler) in _SAMPLERS
        and x.collate_fn is default_collate
    )


def num_loaded_ahead(x: Any) -> int | None:
    """The number of samples that a loader's workers load ahead; None without workers.

    Example:
        >>> loader = DataLoader([1], batch_size=4, num_workers=1, prefetch_factor=5)
        >>> num_loaded_ahead(loader)
        20
        >>> num_loaded_ahead(DataLoader(range(8), batch_size=4))
    """
    if not isinstance(x, DataLoader) or not x.num_workers:
        return None
    return (x.prefetch_factor or 2) * x.num_workers * (x.batch_size or 1)


def describe(x: Any) -> str:
    """The type of `x`, for error messages.

    Example:
        >>> describe(3), describe(np.zeros(1))
        ('a int', 'a numpy.ndarray')
    """
    return f"a {type(x).__module__}.{type(x).__qualname__}".replace("builtins.", "")
