# SPDX-License-Identifier: Apache-2.0
"""Substitutes for results that PopTorch refuses to give.

A survey goes on after a refusal, to see those that follow. So code gets a plausible
value, and tensors of the largest shape that a result may have.
"""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import torch
from torch import Tensor

from ipufit.emulator._tracing.operation import Operation, tensors_in

Call = Callable[..., Any]
"""Calls a function of torch's with arguments, as an operation of the trace."""

_VALUES: dict[str, Any] = {
    "__bool__": True,
    "__complex__": 1j,
    "__contains__": False,
    "__float__": 1.0,
    "__format__": "1",
    "__index__": 0,
    "__int__": 1,
    "allclose": True,
    "backward": None,
    "is_nonzero": True,
}


def substitute(operation: Operation, call: Call) -> Any:
    """A value for the result of a refused operation.

    Args:
        operation: The operation, which was refused for its own sake: it needs values,
            gradients, or gives a shape that depends on values.
        call: Calls functions of torch's.

    Raises:
        KeyError: Nothing can stand in its place.
    """
    name, args = operation.name, operation.args
    if name in _VALUES:
        return _VALUES[name]
    if operation.function is torch.autograd.grad:
        inputs = list(tensors_in(operation.arguments("outputs inputs")["inputs"]))
        return tuple(call(torch.zeros_like, tensor) for tensor in inputs)
    tensor: Tensor = args[0]
    if name in ("cpu", "to"):
        return tensor
    if name == "item":
        return _number(tensor)
    if name == "tolist":
        return np.full(tuple(tensor.shape), _number(tensor)).tolist()
    if name in ("numpy", "__array__"):
        return np.full(tuple(tensor.shape), _number(tensor))
    return _of_largest_shape(operation, tensor, call)


def _number(tensor: Tensor) -> Any:
    """A number of a tensor's type."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


def _of_largest_shape(operation: Operation, tensor: Tensor, call: Call) -> Any:
    name, count = operation.name, tensor.numel()
    if name == "__getitem__":
        return _masked(tensor, operation.args[1], call)
    if name == "masked_select":
        return call(torch.Tensor.reshape, tensor, (-1,))
    whole = {"dtype": torch.int64, "device": "ipu"}
    if name in ("argwhere", "nonzero", "where"):
        if name == "where" or operation.kwargs.get("as_tuple"):
            return tuple(call(torch.zeros, count, **whole) for _ in tensor.shape)
        return call(torch.zeros, count, tensor.dim(), **whole)
    if "unique" in name:
        values = call(torch.Tensor.reshape, tensor, (-1,))
        given = operation.arguments("input sorted return_inverse return_counts")
        more = []
        if given.get("return_inverse"):
            more.append(call(torch.zeros, *tensor.shape, **whole))
        if given.get("return_counts"):
            more.append(call(torch.zeros, count, **whole))
        return (values, *more) if more else values
    raise KeyError(name)


def _masked(tensor: Tensor, index: Any, call: Call) -> Tensor:
    """A tensor as if all elements of masks among its indices were true."""
    if isinstance(index, Tensor):
        rest = tensor.shape[index.dim() :]
        result: Tensor = call(torch.Tensor.reshape, tensor, (-1, *rest))
        return result
    parts = tuple(
        slice(None) if isinstance(part, Tensor) and part.dim() == 1 else part
        for part in (index if isinstance(index, tuple) else (index,))
    )
    taken: Tensor = call(torch.Tensor.__getitem__, tensor, parts)
    return taken
