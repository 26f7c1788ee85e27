# SPDX-License-Identifier: Apache-2.0
"""Slices whose start is computed on the device: `x[a : a + n]`, `dynamic_slice`.

The size has to be a constant of the program, so both ends of `x[a : a + n]` must be the
same tensor with constants added to it (PopTorch user guide, "IPU supported
operations"). Unlike torch's, such a slice goes on at the beginning of the dimension
where it would pass the end (PopTorch, `SliceOps.cpp`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Node

from ipufit.emulator._tracing.nodes import function_name
from ipufit.emulator._tracing.operation import NodesById, Operation
from ipufit.emulator._tracing.state import (
    current_trace,
    is_tracing,
    require_tensor,
)
from ipufit.emulator.errors import Error, createPoptorchError

_CASTS = frozenset({"clone", "int", "long", "positive", "short", "to"})
_SIGNS = {"add": 1, "add_": 1, "sub": -1, "sub_": -1}


def with_constant_bounds(operation: Operation, nodes: NodesById) -> Operation:
    """Read the bounds of slices that are tensors of the host: they are constants.

    Example:
        >>> x = torch.zeros(3)
        >>> args = (x, (slice(torch.tensor([1]), None), 0))
        >>> read = Operation(Tensor.__getitem__, "__getitem__", args, {})
        >>> with_constant_bounds(read, {}).args[1]
        (slice(1, None, None), 0)
    """
    if operation.name not in ("__getitem__", "__setitem__"):
        return operation

    def number(bound: Any) -> Any:
        is_constant = isinstance(bound, Tensor) and id(bound) not in nodes
        return int(bound) if is_constant else bound

    def constant(index: Any) -> Any:
        if isinstance(index, tuple):
            return tuple(map(constant, index))
        if isinstance(index, slice):
            return slice(*map(number, (index.start, index.stop, index.step)))
        return index

    tensor, index, *values = operation.args
    return replace(operation, args=(tensor, constant(index), *values))


def with_moving_slices(operation: Operation, nodes: NodesById) -> Operation:
    """Make `moving_slices` of `tensor[index]` with slices whose ends are on the device.

    Raises:
        Error: The size of such a slice isn't a constant, or isn't positive.

    Example:
        >>> x = torch.zeros(3)
        >>> read = Operation(Tensor.__getitem__, "__getitem__", (x, slice(1, 3)), {})
        >>> with_moving_slices(read, {}) is read
        True
    """
    if operation.name not in ("__getitem__", "__setitem__"):
        return operation
    sizes = moving_sizes(operation.args[1], nodes)
    if not sizes or operation.name == "__setitem__":
        return operation
    args = (*operation.args, sizes)
    return Operation(moving_slices, moving_slices.__name__, args, {})


def moving_sizes(index: Any, nodes: NodesById) -> dict[int, int]:
    """Find the slices whose ends are on the device, and their sizes.

    Args:
        index: The index in `tensor[index]`.
        nodes: Node of each tensor on the device.

    Returns:
        Position of the slice among the parts of `index` to its size.

    Raises:
        Error: A size isn't a constant, or isn't positive.

    Example:
        >>> moving_sizes((slice(1, 3), 0), {})
        {}
    """
    sizes = {}
    for position, part in enumerate(_parts(index)):
        if isinstance(part, slice):
            ends = (part.start, part.stop)
            if any(isinstance(end, Tensor) and id(end) in nodes for end in ends):
                start, stop = (_from_origin(end, nodes) for end in ends)
                if start[0] is not stop[0]:
                    raise _size_varies()
                sizes[position] = stop[1] - start[1]
                check_size(sizes[position])
    return sizes


def moving_slices(tensor: Tensor, index: Any, sizes: dict[int, int]) -> Tensor:
    """Compute `tensor[index]` with slices that move, on the device.

    Args:
        tensor: The tensor to index.
        index: The index in `tensor[index]`.
        sizes: The result of `moving_sizes`.

    Raises:
        Error: A size doesn't divide the dimension.

    Example:
        >>> a = torch.tensor(4)
        >>> moving_slices(torch.arange(6), slice(a, None, 2), {0: 3})
        tensor([4, 0])
    """
    parts = list(_parts(index))
    for position, size in sizes.items():
        dim = _dimension(parts, position, tensor.dim())
        part = parts[position]
        check_factor(size, tensor.shape[dim])
        step = 1 if part.step is None else part.step
        tensor = slice_tensor(tensor, dim, part.start, size, step)
        parts[position] = slice(None)
    part_of_it: Tensor = tensor[tuple(parts)]
    return part_of_it


def slice_tensor(
    tensor: Tensor, dim: int, start: Tensor, size: int, step: int
) -> Tensor:
    """Run `dynamic_slice` on the device."""
    positions = slice_positions(tensor, dim, start, size, step)
    return torch.index_select(tensor, dim, positions)


def slice_positions(
    tensor: Tensor, dim: int, start: Tensor, size: int, step: int
) -> Tensor:
    """Positions along `dim` that a slice takes, wrapping around at the end."""
    first = start.reshape(-1)[:1].long()
    return torch.remainder(first + torch.arange(0, size, step), tensor.shape[dim])


def check_factor(size: int, length: int) -> None:
    """Refuse a size that doesn't divide the dimension.

    Raises:
        Error: `length` is no multiple of `size`.

    Example:
        >>> check_factor(2, 4)
    """
    if length % size:
        raise createPoptorchError(
            f"The size of the slice ({size}) must be a factor of the slicing "
            f"dimension ({length})."
        )


def check_size(size: int) -> None:
    """Refuse a size that isn't positive.

    Raises:
        Error: `size` is 0 or negative.

    Example:
        >>> check_size(1)
    """
    if size == 0:
        raise createPoptorchError("The start and end of a slice must be different.")
    if size < 0:
        raise createPoptorchError(
            "Taking a slice of a tensor with the end less than the start is not "
            f"supported. The size is {size}."
        )


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _dimension(parts: list[Any], position: int, rank: int) -> int:
    """The dimension that the part at `position` indexes."""
    dims = [0 if part is None else 1 for part in parts]
    for place, part in enumerate(parts):
        if part is Ellipsis:
            dims[place] = rank - (sum(dims) - 1)
    return sum(dims[:position])


def _from_origin(end: Any, nodes: NodesById) -> tuple[Node, int]:
    """The tensor that an end is computed from, and the constant added to it."""
    if not isinstance(end, Tensor):
        raise _size_varies()
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


def _size_varies() -> Error:
    return createPoptorchError(
        "The size of the sliced tensor must be a constant for each execution of the "
        "model when running on the IPU: write `x[a : a + n]` with a number n, or use "
        "poptorch.dynamic_slice."
    )


_INDEX_TYPES = (torch.int16, torch.int32, torch.int64)


def dynamic_slice(tensor: Tensor, dim: int, start: Tensor, size: int, step: int) -> Any:
    """Take `tensor[start : start + size : step]` along `dim`, for any `start`.

    On the device a slice beyond the end goes on at the beginning; on the host it
    ends there.

    Args:
        tensor: The tensor to cut.
        dim: The dimension to cut along.
        start: An integer; its first element counts.
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
        first = _first_of(start)
        key = (slice(None),) * (dim % tensor.dim())
        return tensor[(*key, slice(first, first + size, step))]
    check_size(size)
    if step < 1:
        raise createPoptorchError(f"Slicing step must be at least 1. Got {step}.")
    check_factor(size, tensor.shape[dim])
    return trace.record(slice_tensor, tensor, dim, start, size, step)


def dynamic_update(
    input: Tensor, src: Tensor, dim: int, start: Tensor, size: int
) -> Tensor:
    """Copy `input` with `src` in `[start, start + size)` along `dim`.

    Args:
        input: The tensor to copy.
        src: The values to write, `size` long along `dim`.
        dim: The dimension to write along.
        start: An integer; its first element counts.
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
    types = (_device_dtype(input), _device_dtype(src))
    if types[0] != types[1]:
        raise createPoptorchError(
            f"input and src tensor must have same dtype. ({types[0]} vs {types[1]})"
        )
    trace = current_trace()
    if trace is None:
        first = _first_of(start)
        return torch.slice_scatter(input, src, dim, first, first + size, 1)
    check_size(size)
    result: Tensor = trace.record(update_tensor, input, src, dim, start, size)
    return result


def update_tensor(
    tensor: Tensor, src: Tensor, dim: int, start: Tensor, size: int
) -> Tensor:
    """Run `dynamic_update` on the device."""
    positions = slice_positions(tensor, dim, start, size, 1)
    return torch.index_copy(tensor, dim, positions, src)


def _first_of(start: Tensor) -> int:
    return int(start.reshape(-1)[0])


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


def _device_dtype(tensor: Tensor) -> torch.dtype:
    """The type of a tensor where it is computed: a device has no types of 64 bits."""
    narrow = {torch.int64: torch.int32, torch.float64: torch.float32}
    return narrow.get(tensor.dtype, tensor.dtype) if is_tracing() else tensor.dtype
