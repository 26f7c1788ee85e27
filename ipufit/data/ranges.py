# SPDX-License-Identifier: Apache-2.0
"""Refuses numbers that 32 bits can't hold: an IPU has no 64-bit types.

PopTorch keeps the lower 32 bits of an int64, which makes another number of a large one.
"""

from __future__ import annotations

import math
from typing import Callable, Sequence

import torch
from torch import Tensor

from ipufit.errors import DataError

from .structure import SampleStructure

_LEAST, _MOST = -(2**31), 2**31 - 1
_LARGEST = torch.finfo(torch.float32).max


def check_integers(
    batch: Sequence[Tensor],
    structure: SampleStructure,
    name: str,
    sample_of: Callable[[int], int] = int,
) -> None:
    """Refuse rows that have an integer which 32 bits can't hold.

    Args:
        batch: The leaves of the structure; tensors that follow them have no integers.
        structure: How samples nest.
        name: Name of the data in error messages.
        sample_of: Gives the index of the sample in a row of the batch.

    Raises:
        DataError: An integer is too large or too small.

    Example:
        >>> check_integers([torch.tensor([3, 2**32])], SampleStructure.of([0]), "x")
        Traceback (most recent call last):
        ipufit.errors.DataError: Sample 1 of `x` has 4294967296 in its inputs: an IPU...
    """
    for number, tensor in enumerate(batch):
        if tensor.dtype != torch.int64 or not tensor.numel():
            continue
        least, most = torch.aminmax(tensor)
        if least.item() >= _LEAST and most.item() <= _MOST:
            continue
        is_wrong = tensor.lt(_LEAST).logical_or(tensor.gt(_MOST))
        at = tuple(is_wrong.nonzero()[0].tolist())
        as_cut = int(tensor[at].to(torch.int32))
        raise DataError(
            f"Sample {sample_of(at[0])} of `{name}` has {int(tensor[at])} in its "
            f"{leaf_names(structure)[number]}: an IPU has integers of 32 bits, from "
            f"{_LEAST} to {_MOST}, and would take {as_cut} for it. Subtract an offset, "
            "number the values from 0, or pass them as float32 if they are quantities."
        )


def leaf_names(structure: SampleStructure) -> list[str]:
    """The name of each leaf of a sample in error messages.

    Example:
        >>> leaf_names(SampleStructure.of([{"ids": 0}, 0]))
        ["inputs['ids']", 'targets']
    """
    names = ("inputs", "targets", "sample weights")
    return [
        leaf for part, name in zip(structure.parts, names) for leaf in part.paths(name)
    ]


def narrowed(value: Tensor, where: str) -> Tensor:
    """A float64 tensor in float32, as an IPU has no 64-bit floats.

    Args:
        value: Tensor of float64.
        where: Name of the tensor in error messages.

    Raises:
        DataError: A number is too large for float32.

    Example:
        >>> narrowed(torch.tensor([0.5], dtype=torch.float64), "`x`")
        tensor([0.5000])
    """
    narrow = torch.as_tensor(value, dtype=torch.float32)
    is_infinite = torch.isinf(narrow)
    if is_infinite.any():
        at = is_infinite.logical_and(torch.isfinite(value)).nonzero()
        if len(at):
            index = at[0].tolist()
            raise _too_large(float(value[tuple(index)]), where, f" at {index}")
    return narrow


def as_number(value: float, where: str) -> Tensor:
    """A bool, an int or a float as a tensor without axes.

    Args:
        value: The number.
        where: Name of the number in error messages.

    Raises:
        DataError: The number is too large for any type that an IPU has.

    Example:
        >>> as_number(3, "`x`"), as_number(0.5, "`x`")
        (tensor(3), tensor(0.5000))
    """
    if isinstance(value, float) and _LARGEST < abs(value) < math.inf:
        raise _too_large(value, where)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise DataError(
            f"{where} has {value}: an IPU has integers of 32 bits, from {_LEAST} to "
            f"{_MOST}."
        )
    return torch.as_tensor(value)


def _too_large(value: float, where: str, at: str = "") -> DataError:
    return DataError(
        f"{where} has {value}{at}: an IPU has floats of 32 bits, up to {_LARGEST:.6g}, "
        "and that is infinite in them. Scale the values."
    )
