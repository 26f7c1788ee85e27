# SPDX-License-Identifier: Apache-2.0
"""Clouds of points: `fps` and `nearest`, which only the device has."""

from __future__ import annotations

import math
from typing import Any, List, Union

import torch
from torch import Tensor

from ipufit.emulator._tracing.trace_state import (
    Trace,
    current_trace,
    require_tensor,
)
from ipufit.emulator.errors import createPoptorchError

BatchIndices = Union[List[int], Tensor, None]
"""The index of the batch that each point belongs to, sorted; None if all are in one."""


def fps(
    src: Tensor, ptr: list[int], ratio: float = 0.5, random_start: bool = False
) -> Tensor:
    """Sample points that are far from each other, in each segment.

    Args:
        src: The points, `[N, F]`.
        ptr: Indices at which the segments begin, then the end of the last.
        ratio: Share of the points to take, rounded up in each segment.
        random_start: Begin with a random point of a segment, not its first.

    Returns:
        Indices of the points in `src`.

    Raises:
        Error: An argument has another type, or `ptr` is too short.
        NotImplementedError: Outside a trace: PopTorch has no code for the host.

    Example:
        >>> from ipufit.emulator import inferenceModel
        >>> class Sample(torch.nn.Module):
        ...     def forward(self, points):
        ...         return fps(points, [0, 4], 0.5)
        >>> points = torch.tensor([[0.0], [1.0], [2.0], [9.0]])
        >>> inferenceModel(Sample())(points).tolist()
        [0, 3]
    """
    require_tensor(src, "fps takes a torch.tensor of points.")
    if not isinstance(ptr, list) or len(ptr) < 2:
        raise createPoptorchError(
            "`ptr` of fps must be a list of at least two boundaries of segments. "
            f"Got {ptr!r}."
        )
    if not isinstance(ratio, float):
        raise createPoptorchError(f"`ratio` of fps must be a float. Got {ratio!r}.")
    if not isinstance(random_start, bool):
        raise createPoptorchError(
            f"`random_start` of fps must be a bool. Got {random_start!r}."
        )
    result: Tensor = _device("fps").record(
        sample_farthest, src, ptr, ratio, random_start
    )
    return result


def nearest(
    x: Tensor, y: Tensor, batch_x: BatchIndices = None, batch_y: BatchIndices = None
) -> Tensor:
    """Find the nearest point of `y` for each point of `x`, in the same batch.

    Args:
        x: Points, `[N, F]` or `[N]`.
        y: Points, `[M, F]` or `[M]`.
        batch_x: Batch index of each point of `x`, sorted; None: all are in batch 0.
        batch_y: The same for `y`.

    Returns:
        For each point of `x` an index of `y`.

    Raises:
        Error: An argument has another type, or shapes and batches don't go together.
        NotImplementedError: Outside a trace: PopTorch has no code for the host.

    Example:
        >>> from ipufit.emulator import inferenceModel
        >>> class Nearest(torch.nn.Module):
        ...     def forward(self, x, y):
        ...         return nearest(x, y)
        >>> x, y = torch.tensor([0.0, 5.0]), torch.tensor([4.0, 1.0])
        >>> inferenceModel(Nearest())(x, y).tolist()
        [1, 0]
    """
    require_tensor(x, "nearest takes torch.tensors of points.")
    require_tensor(y, "nearest takes torch.tensors of points.")
    _check_batch_type(batch_x)
    _check_batch_type(batch_y)
    trace = _device("nearest")
    _check_points(x, y)
    _check_batches(batch_x, batch_y, len(x), len(y))
    result: Tensor = trace.record(find_nearest, x, y, batch_x, batch_y)
    return result


def sample_farthest(
    src: Tensor, ptr: list[int], ratio: float, random_start: bool
) -> Tensor:
    """Run `fps` on the device."""
    chosen: list[Tensor] = []
    for begin, end in zip(ptr, ptr[1:]):
        points = src[begin:end].reshape(end - begin, -1)
        current = torch.zeros((), dtype=torch.int64)
        if random_start:
            current = torch.randint(end - begin, ())
        distance = torch.full((end - begin,), math.inf, dtype=points.dtype)
        for _ in range(math.ceil((end - begin) * ratio)):
            chosen.append(torch.add(current, begin))
            gap = (points - points[current]).square().sum(dim=1)
            distance = torch.minimum(distance, gap)
            current = distance.argmax()
    return torch.stack(chosen) if chosen else torch.zeros(0, dtype=torch.int64)


def find_nearest(
    x: Tensor, y: Tensor, batch_x: BatchIndices, batch_y: BatchIndices
) -> Tensor:
    """Run `nearest` on the device."""
    gaps = _as_rows(x)[:, None] - _as_rows(y)[None, :]
    distance = gaps.square().sum(dim=2)
    is_other = _batch_of(x, batch_x)[:, None] != _batch_of(y, batch_y)[None, :]
    return torch.argmin(distance.masked_fill(is_other, math.inf), dim=1)


def _device(name: str) -> Trace:
    trace = current_trace()
    if trace is None:
        raise NotImplementedError(
            f"Could not run 'poptorch::{name}' with arguments from the 'CPU' backend: "
            "only a model that runs on the device may use it."
        )
    return trace


def _as_rows(points: Tensor) -> Tensor:
    return points if points.dim() == 2 else points.reshape(-1, 1)


def _batch_of(points: Tensor, batch: BatchIndices) -> Tensor:
    if batch is None or len(batch) == 0:
        return torch.zeros(len(points), dtype=torch.int64)
    return torch.as_tensor(batch)


def _check_batch_type(batch: Any) -> None:
    if batch is not None and not isinstance(batch, (list, Tensor)):
        raise createPoptorchError(
            f"A batch of nearest must be a list or a tensor. Got {type(batch).__name__}"
        )


def _check_points(x: Tensor, y: Tensor) -> None:
    if max(x.dim(), y.dim()) > 2:
        raise createPoptorchError(
            "nearest takes points of at most 2 dimensions. "
            f"Got {list(x.shape)} and {list(y.shape)}."
        )
    if x.shape[1:].numel() != y.shape[1:].numel():
        raise createPoptorchError(
            "nearest takes points with the same number of features. "
            f"Got {list(x.shape)} and {list(y.shape)}."
        )


def _check_batches(
    batch_x: BatchIndices, batch_y: BatchIndices, num_x: int, num_y: int
) -> None:
    for batch, rows in ((batch_x, num_x), (batch_y, num_y)):
        if batch is not None and len(batch) not in (0, rows):
            raise createPoptorchError(
                f"A batch of nearest must have one element per point: {rows}, "
                f"not {len(batch)}."
            )
        if isinstance(batch, list) and batch != sorted(batch):
            raise createPoptorchError(f"A batch of nearest must be sorted: {batch}.")
    if isinstance(batch_x, Tensor) or isinstance(batch_y, Tensor):
        return  # their values aren't known while tracing
    one, other = set(batch_x or [0]), set(batch_y or [0])
    if one != other:
        raise createPoptorchError(
            f"Both batches of nearest must have the same ids: {sorted(one)} and "
            f"{sorted(other)}."
        )
