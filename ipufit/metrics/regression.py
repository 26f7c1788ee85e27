# SPDX-License-Identifier: Apache-2.0
"""Errors of predicted numbers, one value per element."""

from __future__ import annotations

import torch
from torch import Tensor


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The square of each difference.

    Args:
        outputs: Numbers of any shape.
        targets: As many.

    Returns:
        As many.

    Example:
        >>> squared_error(torch.tensor([3.0]), torch.tensor([1.0]))
        tensor([4.])
    """
    return torch.square(_difference(outputs, targets))


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The size of each difference.

    Args:
        outputs: Numbers of any shape.
        targets: As many.

    Returns:
        As many.

    Example:
        >>> absolute_error(torch.tensor([3.0]), torch.tensor([5.0]))
        tensor([2.])
    """
    return torch.abs(_difference(outputs, targets))


def _difference(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.sub(outputs, targets.to(outputs.dtype).reshape(outputs.shape))
