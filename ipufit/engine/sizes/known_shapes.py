# SPDX-License-Identifier: Apache-2.0
"""Functions whose results have shapes that arguments give, where torch asks for values.

PopTorch compiles them. On tensors without values, torch 2.0 computes none of them, and
later versions not all.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KnownShapes(TorchFunctionMode):
    """Has such functions computed by other ones, which need no values, while it is on.

    Example:
        >>> from ipufit.engine.sizes.shapes_only import shapes_only
        >>> with shapes_only():  # which enters this mode
        ...     hot = torch.nn.functional.one_hot(torch.zeros(4, dtype=torch.int64), 3)
        >>> hot.shape
        torch.Size([4, 3])
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = NotImplemented
        if func in _INSTEAD:
            result = _INSTEAD[func](*args, **(kwargs or {}))
        if result is NotImplemented:
            return func(*args, **(kwargs or {}))
        return result


def _repeated(
    input: Tensor,
    repeats: Any,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> Any:
    if not isinstance(repeats, int) or repeats < 1:
        return NotImplemented
    rows = input.reshape(-1) if dim is None else input
    dim = 0 if dim is None else dim
    if not -rows.dim() <= dim < rows.dim():
        return NotImplemented
    place = dim % rows.dim()
    shape = [*rows.shape[: place + 1], repeats, *rows.shape[place + 1 :]]
    return rows.unsqueeze(place + 1).expand(shape).flatten(place, place + 1)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Any:
    if num_classes < 1 or tensor.dtype != torch.int64:
        return NotImplemented
    classes = torch.arange(num_classes, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)


def _counted(
    input: Tensor,
    weights: Tensor | None = None,
    minlength: int = 0,
) -> Any:
    if minlength < 1 or input.dim() != 1:
        return NotImplemented
    given = torch.ones_like(input) if weights is None else weights
    zeros = torch.zeros(minlength, dtype=given.dtype, device=input.device)
    return zeros.index_add(0, input, given)


_INSTEAD: dict[Any, Callable[..., Any]] = {
    torch.repeat_interleave: _repeated,
    Tensor.repeat_interleave: _repeated,
    torch.nn.functional.one_hot: _one_hot,
    torch.bincount: _counted,
    Tensor.bincount: _counted,
}
"""Each gives NotImplemented where the shape depends on values after all."""
