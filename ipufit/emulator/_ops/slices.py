# SPDX-License-Identifier: Apache-2.0
"""Slices whose start is computed on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ipufit.emulator._tracing.moving_slices import (
    check_factor,
    check_size,
    slice_positions,
    slice_tensor,
)
from ipufit.emulator._tracing.trace_state import (
    current_trace,
    is_tracing,
    require_tensor,
)
from ipufit.emulator.errors import createPoptorchError

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
