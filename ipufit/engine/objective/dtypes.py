# SPDX-License-Identifier: Apache-2.0
"""The dtypes in which losses and figures are computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ipufit._tree import tree_map
from ipufit.data import Labels

_WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32)


def widened(values: Any) -> Any:
    """Convert nested tensors to the dtypes that torch's losses and exact sums need.

    Half precision becomes float32, and every whole-number type int64, as which class
    indices leave a device but in 32 bits.

    Example:
        >>> widened((torch.zeros(1, dtype=torch.float16), 3))[0].dtype
        torch.float32
    """

    def widen(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dtype == torch.float16:
            return leaf.to(torch.float32)
        return leaf.to(torch.int64) if leaf.dtype in _WHOLE_NUMBERS else leaf

    return tree_map(widen, values)


def widened_all(outputs: Any, labels: Labels) -> tuple[Any, Labels]:
    """Convert outputs, targets and weights to the dtypes that losses need."""
    outputs, targets, weights = widened((outputs, labels.targets, labels.weights))
    return outputs, labels._replace(targets=targets, weights=weights)
