# SPDX-License-Identifier: Apache-2.0
"""Finds the arrays behind a `Subset`, such as a part of a `random_split`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from .cached import CachedDataset


def arrays_behind(dataset: Any) -> tuple[Any, Tensor] | None:
    """The data in memory that a subset takes its samples of, and their rows in it.

    A subclass may do more than give tensors, so it counts as any other dataset.

    Args:
        dataset: Any dataset.

    Returns:
        A `TensorDataset` or `CachedDataset`, and `[samples]` indices of 0 or more; or
        None if `dataset` is no `Subset` of one, or has no samples.

    Example:
        >>> whole = TensorDataset(torch.arange(10))
        >>> _, rows = arrays_behind(Subset(Subset(whole, range(4, 10)), [0, -1]))
        >>> rows
        tensor([4, 9])
    """
    if type(dataset) is not Subset:
        return None
    inner: Any = dataset.dataset
    if type(inner) in (TensorDataset, CachedDataset):
        return _rows_of(dataset.indices, inner, torch.arange(len(inner)))
    found = arrays_behind(inner)
    return None if found is None else _rows_of(dataset.indices, *found)


def _rows_of(indices: Any, base: Any, rows: Tensor) -> tuple[Any, Tensor] | None:
    """The rows of some samples; None if an index is none of a sample."""
    try:
        given = torch.as_tensor(indices if hasattr(indices, "dtype") else list(indices))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    if given.dim() != 1 or given.dtype not in (torch.int64, torch.int32):
        return None
    at, count = given.long(), len(rows)
    if not len(at) or not bool((at.ge(-count) & at.lt(count)).all()):
        return None
    return base, rows[torch.where(at.lt(0), at + count, at)]
