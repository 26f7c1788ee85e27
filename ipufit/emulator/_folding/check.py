# SPDX-License-Identifier: Apache-2.0
"""Compare the results of two ways to compute the same."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

RELATIVE = 1e-4
"""The largest difference of elements, as a share of their tensor's largest element."""

SHARE_OF_LARGEST = 1e-6
"""The difference allowed besides, as a share of the largest element of all tensors.

Gradients that are 0 but for rounding, such as those of the keys' biases in attention,
have no size of their own.
"""


def difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> str | None:
    """Describe how two lists of tensors differ beyond rounding.

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
        is_same = torch.eq(left, right)
        if left.is_floating_point():
            is_same |= left.isnan() & right.isnan()
        if bool(is_same.all()):
            continue
        gaps = (left.double() - right.double()).masked_fill(is_same, 0.0)
        gap = float(gaps.abs().max())
        largest = _largest(left)
        allowed = RELATIVE * largest + floor if left.is_floating_point() else 0.0
        if not gap <= allowed:  # nor if it is no number
            return (
                f"tensor {index} differs by {gap:.3g}, and its largest element is "
                f"{largest:.3g}"
            )
    return None


def _largest(tensor: Tensor) -> float:
    if tensor.numel() == 0 or not (tensor.is_floating_point()):
        return 0.0
    return float(tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())
