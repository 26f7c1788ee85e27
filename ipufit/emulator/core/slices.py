# SPDX-License-Identifier: Apache-2.0
"""Slices whose start is computed on the device: `x[a : a + n]`, `dynamic_slice`.

The size must be a constant of the program, so both ends of `x[a : a + n]` must be the
same tensor plus constants (PopTorch user guide, "IPU supported operations"). Unlike in
torch, a slice that passes the end of the dimension continues at the beginning
(PopTorch, `SliceOps.cpp`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Node

from ..errors import createPoptorchError
from .graph import NodesById, function_name
from .recording import current_trace, is_tracing, require_tensor

_CASTS = frozenset({"clone", "int", "long", "positive", "short", "to"})
_SIGNS = {"add": 1, "add_": 1, "sub": -1, "sub_": -1}


def moving_slices(tensor: Tensor, index: Any, sizes: dict[int, int]) -> Tensor:
    """Compute `tensor[index]` on the device, with slices whose start is a tensor.

    Args:
        tensor: The tensor to index.
        index: The index in `tensor[index]`.
        sizes: Size of each moving slice, by its position in `index`.

    Raises:
        Error: A size doesn't divide the dimension.

    Example:
        >>> a = torch.tensor(4)
        >>> moving_slices(torch.arange(6), slice(a, None, 2), {0: 3})
        tensor([4, 0])
    """
    parts = list(_parts(index))
    for position, size in sizes.items():
        dims = [0 if part is None else 1 for part in parts]
        for place, part in enumerate(parts):
            if part is Ellipsis:
                dims[place] = tensor.dim() - (sum(dims) - 1)
        dim, part = sum(dims[:position]), parts[position]
        _check_factor(size, tensor.shape[dim])
        step = 1 if part.step is None else part.step
        tensor = slice_tensor(tensor, dim, part.start, size, step)
        parts[position] = slice(None)
    return tensor[tuple(parts)]


def slice_tensor(
    tensor: Tensor, dim: int, start: Tensor, size: int, step: int
) -> Tensor:
    """Run `dynamic_slice` on the device."""
    positions = _positions(tensor, dim, start, size, step)
    return torch.index_select(tensor, dim, positions)


def _positions(tensor: Tensor, dim: int, start: Tensor, size: int, step: int) -> Tensor:
    """Return the indices along `dim` of a slice that wraps around at the end."""
    first = start.reshape(-1)[:1].long()
    return torch.remainder(first + torch.arange(0, size, step), tensor.shape[dim])


def _check_factor(size: int, length: int) -> None:
    """Refuse a size that doesn't divide the dimension."""
    if length % size:
        raise createPoptorchError(
            f"The size of the slice ({size}) must be a factor of the slicing "
            f"dimension ({length})."
        )


def _check_size(size: int) -> None:
    """Refuse a size that isn't positive."""
    if size == 0:
        raise createPoptorchError("The start and end of a slice must be different.")
    if size < 0:
        raise createPoptorchError(
            "Taking a slice of a tensor with the end less than the start is not "
            f"supported. The size is {size}."
        )


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def size_of_slice(start: Any, stop: Any, nodes: NodesById) -> int:
    """Return the size of a slice with an end on the device."""
    if isinstance(start, Tensor) and isinstance(stop, Tensor):
        (origin, before), (other, after) = (
            _from_origin(e, nodes) for e in (start, stop)
        )
        if origin is other:
            _check_size(after - before)
            return after - before
    raise createPoptorchError(
        "The size of the sliced tensor must be a constant for each execution of the "
        "model when running on the IPU: write `x[a : a + n]` with a number n, or use "
        "poptorch.dynamic_slice."
    )


def _from_origin(end: Tensor, nodes: NodesById) -> tuple[Node, int]:
    """Return the node that an end is computed from, and the added constant."""
    node, offset = nodes[id(end)], 0
    while node.op in ("call_function", "call_method"):
        name = function_name(node)
        if name in _CASTS:
            node = node.all_input_nodes[0]
            continue
        if name not in _SIGNS or node.kwargs:
            break
        variable, constant = node.args[0], _constant(node.args[1])
        if constant is None or not isinstance(variable, Node):
            break
        node, offset = variable, offset + _SIGNS[name] * constant
    return node, offset


def _constant(value: Any) -> int | None:
    if isinstance(value, Node) and value.target is torch.tensor:
        value = value.args[0]
        while isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
    return value if isinstance(value, int) else None


_INDEX_TYPES = (torch.int16, torch.int32, torch.int64)


def dynamic_slice(tensor: Tensor, dim: int, start: Tensor, size: int, step: int) -> Any:
    """Take `tensor[start : start + size : step]` along `dim`, for any `start`.

    On the device a slice beyond the end goes on at the beginning; on the host it
    ends there.

    Args:
        tensor: The tensor to cut.
        dim: The dimension to cut along.
        start: An integer tensor; its first element counts.
        size: Number of elements between the ends, a constant. On the device it must
            divide the dimension.
        step: Distance of the elements that are taken.

    Raises:
        Error: An argument has another type, or the device can't have this size.

    Example:
        >>> x = torch.arange(6)
        >>> dynamic_slice(x, 0, torch.tensor([2]), 3, 1)
        tensor([2, 3, 4])
    """
    require_tensor(tensor, "dynamic_slice must take a torch.tensor input.")
    _check_position(dim, start, size, "dynamic_slice")
    _require_int(step, "Step")
    trace = current_trace()
    if trace is None:
        first = int(start.reshape(-1)[0])
        key = (slice(None),) * (dim % tensor.dim())
        return tensor[(*key, slice(first, first + size, step))]
    _check_size(size)
    if step < 1:
        raise createPoptorchError(f"Slicing step must be at least 1. Got {step}.")
    _check_factor(size, tensor.shape[dim])
    return trace.record(slice_tensor, tensor, dim, start, size, step)


def dynamic_update(
    input: Tensor, src: Tensor, dim: int, start: Tensor, size: int
) -> Tensor:
    """Return a copy of `input` with `src` in `[start, start + size)` along `dim`.

    Args:
        input: The tensor to copy.
        src: The values to write, `size` long along `dim`.
        dim: The dimension to write along.
        start: An integer tensor; its first element counts.
        size: Number of elements to write, a constant.

    Raises:
        Error: An argument has another type, `input` and `src` don't go together, or
            the device can't have this size.

    Example:
        >>> x = torch.zeros(4)
        >>> dynamic_update(x, torch.ones(2), 0, torch.tensor([1]), 2)
        tensor([0., 1., 1., 0.])
    """
    require_tensor(input, "dynamic_update must take a torch.tensor input.")
    require_tensor(src, "dynamic_update must take a torch.tensor src.")
    _check_position(dim, start, size, "dynamic_update")
    if input.dim() != src.dim():
        raise createPoptorchError(
            "input and src tensors must have same dimensionality. "
            f"({input.dim()}) vs ({src.dim()})"
        )
    # A device has no types of 64 bits.
    narrow = {torch.int64: torch.int32, torch.float64: torch.float32}
    narrow = narrow if is_tracing() else {}
    types = [narrow.get(t.dtype, t.dtype) for t in (input, src)]
    if types[0] != types[1]:
        raise createPoptorchError(
            f"input and src tensor must have same dtype. ({types[0]} vs {types[1]})"
        )
    trace = current_trace()
    if trace is None:
        first = int(start.reshape(-1)[0])
        return torch.slice_scatter(input, src, dim, first, first + size, 1)
    _check_size(size)
    return trace.record(update_tensor, input, src, dim, start, size)


def update_tensor(
    tensor: Tensor, src: Tensor, dim: int, start: Tensor, size: int
) -> Tensor:
    """Run `dynamic_update` on the device."""
    positions = _positions(tensor, dim, start, size, 1)
    return torch.index_copy(tensor, dim, positions, src)


def _check_position(dim: Any, start: Any, size: Any, function: str) -> None:
    _require_int(dim, "Dimension")
    require_tensor(start, f"Slice start argument to {function} must be a torch.tensor.")
    _require_int(size, "Size")
    if start.dtype not in _INDEX_TYPES:
        raise createPoptorchError(
            f"Expected integer typed start tensor, got {start.dtype}."
        )


def _require_int(value: Any, what: str) -> None:
    if not isinstance(value, int):
        raise createPoptorchError(
            f"{what} must be an integer. Got {type(value).__name__}."
        )
