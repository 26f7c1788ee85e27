# SPDX-License-Identifier: Apache-2.0
"""Functions a module may call in `forward` (`poptorch.*`, `poptorch.ops`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ._control_flow import cond, for_loop
from ._custom_ops import ATTR_PREFIX, attributes_lists, custom_op
from ._decoder import ctc_beam_search_decoder
from ._host_calls import CPU
from ._markers import (
    NameScope,
    nop,
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
)
from ._multi_conv import MultiConv
from ._overlap import set_overlap_for_input, set_overlap_for_output
from ._points import fps, nearest
from ._slices import dynamic_slice, dynamic_update
from ._tensor_log import ipu_print_tensor

__all__ = [
    "ATTR_PREFIX",
    "CPU",
    "MultiConv",
    "NameScope",
    "attributes_lists",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "fps",
    "identity_loss",
    "ipu_print_tensor",
    "nearest",
    "nop",
    "recomputationCheckpoint",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]


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
        AssertionError: `reduction` is none of these.

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
