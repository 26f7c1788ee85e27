# SPDX-License-Identifier: Apache-2.0
"""Numbers that 32 bits can't hold, as an IPU has no others.

PopTorch cuts int64 to its lower 32 bits, which makes another number of a larger one.
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
        batch: The leaves of the structure; what else follows them has no integers.
        structure: How samples nest.
        name: What messages call the data.
        sample_of: The index of the sample that is in a row of the batch.

    Raises:
        DataError: There is one.

    Example:
        >>> check_integers([torch.tensor([3, 2**32])], SampleStructure.of([0]), "x")
        Traceback (most recent call last):
        ipufit.errors.DataError: Sample 1 of `x` has 4294967296 in its inputs: an IPU...
    """
    for place, tensor in enumerate(batch):
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
            f"{leaf_names(structure)[place]}: an IPU has integers of 32 bits, from "
            f"{_LEAST} to {_MOST}, and would take {as_cut} for it. Subtract an offset, "
            "number the values from 0, or pass them as float32 if they are quantities."
        )


def leaf_names(structure: SampleStructure) -> list[str]:
    """What messages call each leaf of a sample.

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
        value: Of float64.
        where: What messages call it.

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
            place = tuple(at[0].tolist())
            raise _too_large(float(value[place]), f"{where} has", list(place))
    return narrow


def as_number(value: float, where: str) -> Tensor:
    """A number of Python's as a tensor without axes.

    Args:
        value: A bool, an int or a float.
        where: What messages call it.

    Raises:
        DataError: It is too large for any type that an IPU has.

    Example:
        >>> as_number(3, "`x`"), as_number(0.5, "`x`")
        (tensor(3), tensor(0.5000))
    """
    if isinstance(value, float) and _LARGEST < abs(value) < math.inf:
        raise _too_large(value, f"{where} has", [])
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise DataError(
            f"{where} has {value}: an IPU has integers of 32 bits, from {_LEAST} to "
            f"{_MOST}."
        )
    return torch.as_tensor(value)


def _too_large(value: float, who: str, at: list[int]) -> DataError:
    place = f" at {at}" if at else ""
    return DataError(
        f"{who} {value}{place}: an IPU has floats of 32 bits, up to {_LARGEST:.6g}, "
        "and that is infinite in them. Scale the values."
    )
