# SPDX-License-Identifier: Apache-2.0
"""`identity_loss`: the mark of the loss to minimise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def identity_loss(x: Tensor, reduction: str) -> Tensor:
    """Mark `x` as the loss to minimise, and reduce it.

    Back-propagation starts at the one final loss of a training model. The built-in
    loss functions mark themselves; anything computed by hand, or from several of
    them, must be marked with this function (PopTorch user guide, "Custom loss").

    Args:
        x: The loss, of any shape.
        reduction: `"sum"` or `"mean"` over all elements, or `"none"`.

    Returns:
        The reduced loss: 0-d, or of the shape of `x` for `"none"`.

    Raises:
        AssertionError: `reduction` is something else.

    Example:
        >>> identity_loss(torch.tensor([1.0, 3.0]), reduction="mean")
        tensor(2.)
    """
    if has_torch_function((x,)):
        # Let a trace see the mark itself, not only the sum or mean below.
        result: Any = handle_torch_function(identity_loss, (x,), x, reduction=reduction)
        return result  # type: ignore[no-any-return]
    if reduction == "sum":
        return torch.sum(x)
    if reduction == "mean":
        return torch.mean(x)
    if reduction == "none":
        return torch.clone(x)
    raise AssertionError(
        f"Unsupported reduction type! Got {reduction!r}, expected 'sum', 'mean' or "
        "'none'."
    )
