# SPDX-License-Identifier: Apache-2.0
"""Compare the results of two ways to compute the same."""

from __future__ import annotations

import math
from typing import Sequence

import torch
from torch import Tensor

RELATIVE = 1e-4
"""The largest difference of elements, as a share of their tensor's largest element."""

RELATIVE_OF_HALF = 0.05
"""The same where values are rounded to float16 on the way.

A sum that is made in another order may be rounded to the next number: a step of 0.001,
which all that follows carries on.
"""

SHARE_OF_LARGEST = 1e-6
"""The difference allowed besides, as a share of the largest element of all tensors.

Gradients that are 0 but for rounding, such as those of the keys' biases in attention,
have no size of their own.
"""

_LONGEST_PIECE = 2**20


def difference(
    one: Sequence[Tensor], other: Sequence[Tensor], relative: float = RELATIVE
) -> str | None:
    """Describe how two lists of tensors differ beyond rounding.

    Args:
        one: Tensors.
        other: As many of the same shapes and types, if they don't differ.
        relative: The largest difference of elements, as a share of their tensor's
            largest element.

    Returns:
        Text for people; None if they don't differ.

    Example:
        >>> difference([torch.ones(2)], [torch.ones(2) + 1e-6]) is None
        True
        >>> difference([torch.ones(2)], [torch.tensor([1.0, 1.5])])
        'tensor 0 differs by 0.5, and its largest element is 1'
    """
    if len(one) != len(other):
        return f"there are {len(one)} and {len(other)} tensors"
    floor = SHARE_OF_LARGEST * max(map(_largest, one), default=0.0)
    for index, (left, right) in enumerate(zip(one, other)):
        if left.shape != right.shape or left.dtype != right.dtype:
            return (
                f"tensor {index} is {tuple(left.shape)} of {left.dtype}, or "
                f"{tuple(right.shape)} of {right.dtype}"
            )
        gap = _gap(left, right)
        if gap == 0.0:
            continue
        largest = _largest(left)
        allowed = relative * largest + floor if left.is_floating_point() else 0.0
        if not gap <= allowed:  # nor if it is no number
            return (
                f"tensor {index} differs by {gap:.3g}, and its largest element is "
                f"{largest:.3g}"
            )
    return None


def _gap(left: Tensor, right: Tensor) -> float:
    """The largest difference of elements; NaN where only one of two is NaN."""
    largest = 0.0
    for ones, others in zip(_pieces(left), _pieces(right)):
        is_same = torch.eq(ones, others)
        if left.is_floating_point():
            is_same |= ones.isnan() & others.isnan()
        if not bool(is_same.all()):
            gaps = (ones.double() - others.double()).masked_fill(is_same, 0.0)
            gap = float(gaps.abs().max())
            if not gap <= largest:  # also if it is no number
                largest = gap
            if math.isnan(gap):
                break
    return largest


def _largest(tensor: Tensor) -> float:
    if tensor.numel() == 0 or not (tensor.is_floating_point()):
        return 0.0
    return max(
        float(piece.abs().nan_to_num(0.0, 0.0, 0.0).max()) for piece in _pieces(tensor)
    )


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Cut a tensor up: what is computed of each piece is little beside the whole."""
    pieces: Sequence[Tensor] = tensor.detach().reshape(-1).split(_LONGEST_PIECE)
    return pieces
