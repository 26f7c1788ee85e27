# SPDX-License-Identifier: Apache-2.0
"""Stacks the samples of a batch leaf by leaf, instead of looking at each by itself."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from ipufit._tree import CONSTANT, Structure

from .structure import NOTHING, SampleStructure


def stacked_leaves(
    samples: Sequence[Sequence[Any]],
    structure: SampleStructure,
    likes: Sequence[tuple[torch.Size, torch.dtype]],
) -> list[Tensor] | None:
    """The leaves of samples, stacked as `default_collate` does it.

    Args:
        samples: Parts of each sample: inputs, targets, weights.
        structure: How a sample must nest.
        likes: Shape and type that each leaf must have.

    Returns:
        `[samples, ...]` for each leaf; or None if a sample is unlike the others, or
        has leaves that need a closer look. No error is raised for them: the caller
        looks at each sample by itself then.

    Example:
        >>> structure = SampleStructure.of((torch.ones(2), 1))
        >>> likes = [(torch.Size([2]), torch.float32), (torch.Size(), torch.int64)]
        >>> stacked_leaves([(torch.ones(2), 3), (torch.zeros(2), 4)], structure, likes)
        [tensor([[1., 1.], [0., 0.]]), tensor([3, 4])]
    """
    columns = _columns_of_parts(samples, structure)
    if columns is None or len(columns) != len(likes):
        return None
    leaves = []
    for column, (shape, dtype) in zip(columns, likes):
        leaf = _stacked(column, shape, dtype)
        if leaf is None:
            return None
        leaves.append(leaf)
    return leaves


def _columns_of_parts(
    samples: Sequence[Sequence[Any]], structure: SampleStructure
) -> list[Sequence[Any]] | None:
    count = len(samples[0]) if samples else 0
    if not count or any(len(parts) != count for parts in samples):
        return None
    if any(part != NOTHING for part in structure.parts[count:]):
        return None
    columns: list[Sequence[Any]] = []
    for part, values in zip(structure.parts, zip(*samples)):
        if part == NOTHING:
            if any(value is not None for value in values):
                return None
            continue
        own = _columns(part, values)
        if own is None:
            return None
        columns += own
    return columns


def _columns(structure: Structure, values: Sequence[Any]) -> list[Any] | None:
    """The values of each leaf; None if values don't nest exactly as the structure."""
    if structure.kind is None:
        return [values]
    if structure.kind == CONSTANT:
        (expected,) = structure.keys
        are_same = all(type(v) is type(expected) and v == expected for v in values)
        return [] if are_same else None
    if structure.kind not in (dict, list, tuple):
        return None
    if any(type(value) is not structure.kind for value in values):
        return None
    count = len(structure.children)
    if any(len(value) != count for value in values):
        return None
    keys = structure.keys if structure.kind is dict else range(count)
    columns: list[Any] = []
    for key, child in zip(keys, structure.children):
        if structure.kind is dict and not all(key in value for value in values):
            return None
        own = _columns(child, [value[key] for value in values])
        if own is None:
            return None
        columns += own
    return columns


def _stacked(
    values: Sequence[Any], shape: torch.Size, dtype: torch.dtype
) -> Tensor | None:
    """The stacked values of a leaf; None if they are no plain tensors or numbers."""
    kind = type(values[0])
    if any(type(value) is not kind for value in values):
        return None
    if kind in (bool, int, float):
        return _stacked_numbers(values, dtype) if not shape else None
    if kind is np.ndarray:
        values = [_of_array(value) for value in values]
    elif kind is not Tensor:
        return None
    for value in values:
        if (
            value is None
            or value.shape != shape
            or value.dtype is not dtype
            or value.requires_grad
            or value.layout is not torch.strided
            or value.device.type != "cpu"
        ):
            return None
    stacked = torch.stack(list(values))
    # Processes that load stack into shared memory, which has torch's own strides.
    return stacked if get_worker_info() is None else stacked.contiguous()


def _stacked_numbers(values: Sequence[float], dtype: torch.dtype) -> Tensor | None:
    try:
        stacked = torch.tensor(values)
    except (OverflowError, RuntimeError, ValueError):  # an int of more than 64 bits
        return None
    is_float = dtype.is_floating_point
    if stacked.dtype is not dtype or (is_float and torch.isinf(stacked).any()):
        return None
    return stacked


def _of_array(array: Any) -> Tensor | None:
    """The tensor of an array; None if that needs care."""
    flags = array.flags
    if array.dtype.kind not in "biuf" or not (flags.c_contiguous and flags.writeable):
        return None
    try:
        return torch.from_numpy(array)
    except TypeError:  # a type that torch doesn't have
        return None
