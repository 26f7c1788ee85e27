# SPDX-License-Identifier: Apache-2.0
"""Functions that reshape outputs, targets and weights to fit each other.

The class axis is the last, or the second, as in torch's losses, if class indices fit
only that. Only shapes are read, never values, so that a device can trace it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ipufit.errors import DataError

from .base import in_float32, spread_weights, weighed, zeros_like

IGNORED_INDEX = -100
"""The class index that doesn't count, as in torch's losses."""


class Elements(NamedTuple):
    """Outputs, targets and weights: float32 tensors of one shape."""

    outputs: Tensor
    targets: Tensor
    weights: Tensor


class Classified(NamedTuple):
    """Scores of classes, with one class index for each sample or position.

    Attributes:
        scores: `[..., C]`, float32.
        labels: `[...]`, integers; a valid index also where the weight is 0.
        weights: `[...]`, float32; 0 for targets that are ignored.
    """

    scores: Tensor
    labels: Tensor
    weights: Tensor


def is_binary(outputs: Tensor) -> bool:
    """Return whether there is one output per sample or position.

    Raises:
        DataError: The outputs aren't one tensor.

    Example:
        >>> is_binary(torch.zeros(4, 1)), is_binary(torch.zeros(4, 2))
        (True, False)
    """
    _check_tensors(outputs=outputs)
    return outputs.dim() == 1 or int(outputs.shape[-1]) == 1


def is_of_bits(
    outputs: Tensor, targets: Tensor, *, has_binary_loss: bool | None
) -> bool:
    """Return whether each output is a problem of its own, with a target of 0 or 1.

    Args:
        outputs: Outputs of the model.
        targets: Their targets.
        has_binary_loss: Whether the loss of the outputs is binary; None if unknown.

    Example:
        >>> masks = torch.zeros(2, 1, 8, 8)
        >>> is_of_bits(masks, torch.zeros(2, 8, 8), has_binary_loss=None)
        True
    """
    if is_binary(outputs):
        return True
    _check_tensors(targets=targets)
    if _extent(outputs) != _extent(targets):
        return False
    # [N, 1, L] with targets of that shape may also be sequences of one step.
    is_channel = outputs.dim() > 2 and outputs.shape[1] == 1
    has_channel = is_channel and (outputs.dim() > 3 or targets.shape != outputs.shape)
    return has_channel if has_binary_loss is None else has_binary_loss


def weights_like(values: Tensor, weights: Tensor | None) -> Tensor:
    """Expand weights to the shape of `values`, in float32; ones for None."""
    if weights is None:
        return torch.ones_like(values, dtype=torch.float32)
    return spread_weights(weights, values)


def matched_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """Reshape targets to the outputs' shape, in float32.

    Axes of size 1 make no difference: `[N]` targets fit `[N, 1]` outputs.

    Raises:
        DataError: The shapes differ in other axes.

    Example:
        >>> matched_targets(torch.zeros(2, 1), torch.tensor([1, 2])).tolist()
        [[1.0], [2.0]]
    """
    _check_tensors(outputs=outputs, targets=targets)
    if _extent(outputs) != _extent(targets):
        raise DataError(
            f"Targets of shape {tuple(targets.shape)} don't fit outputs of shape "
            f"{tuple(outputs.shape)}: this metric needs a target for each output."
        )
    matched = in_float32(targets)
    return matched if matched.shape == outputs.shape else matched.reshape(outputs.shape)


def elements(outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Elements:
    """Reshape targets and weights to the outputs' shape, all in float32.

    Args:
        outputs: Numbers of any shape, one row per sample.
        targets: Numbers of the same shape, up to axes of size 1.
        weights: `[rows]` or `[rows, ...]`; None for ones.

    Raises:
        DataError: The shapes don't fit.
    """
    matched = matched_targets(outputs, targets)
    return Elements(in_float32(outputs), matched, weights_like(matched, weights))


def classified(
    outputs: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    ignore_index: int = IGNORED_INDEX,
) -> Classified:
    """Reshape scores of classes, class indices and weights to fit each other.

    Args:
        outputs: Scores `[..., C]`.
        targets: Class indices `[...]` or `[..., 1]`, or one-hot `[..., C]`.
        weights: `[rows]` or `[rows, ...]`; None for ones.
        ignore_index: Class index of targets that are ignored.

    Raises:
        DataError: The shapes don't fit.

    Example:
        >>> classified(torch.eye(2), torch.tensor([1, -100]), None)[1:]
        (tensor([1, 0]), tensor([1., 0.]))
    """
    if has_class_axis(outputs, targets):
        labels = targets.argmax(dim=-1)
        spread = whole_rows(targets, weights_like(labels, weights))
        return Classified(in_float32(outputs), labels, spread)
    labels = class_indices(outputs, targets)
    if labels.shape != outputs.shape[:-1]:
        outputs = outputs.movedim(1, -1)
    counts = labels.ne(ignore_index)
    spread = weights_like(labels, weights)
    return Classified(
        in_float32(outputs),
        torch.where(counts, labels, zeros_like(labels)),
        torch.where(counts, spread, zeros_like(spread)),
    )


def whole_rows(targets: Tensor, weights: Tensor) -> Tensor:
    """Return the weights of one-hot targets, NaN for those that don't sum to 1.

    A program can't raise an error: `Metric.result` does.
    """
    sums = in_float32(targets).sum(dim=-1)
    is_wrong = sums.sub(1.0).abs().gt(0.01).logical_and(weights.ne(0))
    marked: Tensor = weights.masked_fill(is_wrong, float("nan"))
    return marked


def has_class_axis(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether targets are one-hot or probabilities, and not class indices.

    Example:
        >>> has_class_axis(torch.zeros(4, 3), torch.zeros(4, 3))
        True
        >>> has_class_axis(torch.zeros(4, 3), torch.zeros(4, 1))
        False
    """
    _check_tensors(outputs=outputs, targets=targets)
    return targets.shape == outputs.shape and not is_binary(outputs)


def class_indices(outputs: Tensor, targets: Tensor) -> Tensor:
    """Reshape class indices to the outputs' shape without class axis, as integers.

    Args:
        outputs: Scores `[..., C]`, or `[rows, C, ...]`.
        targets: Class indices `[...]` or `[..., 1]`, of any type.

    Raises:
        DataError: The shapes don't fit, or classes could be on either axis.

    Example:
        >>> class_indices(torch.zeros(2, 5, 3), torch.ones(2, 3, 1)).shape
        torch.Size([2, 3])
    """
    _check_tensors(outputs=outputs, targets=targets)
    shape = outputs.shape[:-1]
    last = targets.shape in (shape, (*shape, 1))
    moved = outputs.shape[:1] + outputs.shape[2:]
    second = outputs.dim() > 2 and targets.shape in (moved, (*moved, 1))
    if is_binary(outputs) or not (last or second):
        raise DataError(
            f"Targets of shape {tuple(targets.shape)} are no class indices for outputs "
            f"of shape {tuple(outputs.shape)}: with classes on the last axis they "
            f"would have shape {tuple(shape)}."
        )
    if last and second and outputs.dim() > 2:
        raise DataError(
            f"Outputs of shape {tuple(outputs.shape)} have as many classes as "
            f"positions, so their classes may be on axis 1 or {outputs.dim() - 1}: "
            f"give them and their targets another axis of size 1, as in "
            f"outputs.unsqueeze(-2) and targets.unsqueeze(-1) for classes on the last."
        )
    is_integer = not targets.dtype.is_floating_point and targets.dtype != torch.bool
    indices = targets if is_integer else targets.to(torch.int32)
    wanted = shape if last else moved
    return indices if indices.shape == wanted else indices.reshape(wanted)


def dense_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """Check that targets have the outputs' shape, and cast them to float32.

    Raises:
        DataError: The shapes differ.
    """
    if not has_class_axis(outputs, targets):
        raise DataError(
            f"Targets of shape {tuple(targets.shape)} aren't one-hot or probabilities "
            f"for outputs of shape {tuple(outputs.shape)}, which they are when the "
            "shapes agree. For class indices there is a 'sparse_...' metric."
        )
    dense: Tensor = targets.to(torch.float32)
    return dense


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Turn class indices into one-hot bools `[..., C]`.

    Example:
        >>> one_hot(torch.tensor([1, 0]), 2)
        tensor([[False,  True],
                [ True, False]])
    """
    classes = torch.arange(num_classes, device=labels.device, dtype=torch.int32)
    marks: Tensor = labels.to(torch.int32).unsqueeze(-1).eq(classes)
    return marks


def total_marked(marks: Tensor, weights: Tensor) -> Tensor:
    """Sum the weights of the marks in each column.

    Args:
        marks: Bools `[..., C]`.
        weights: Float32, of a shape that expands to that of `marks`.

    Returns:
        Tensor `[C]`, float32.

    Example:
        >>> total_marked(torch.eye(2).bool(), torch.tensor([[2.0], [3.0]]))
        tensor([2., 3.])
    """
    values = weighed(marks.to(torch.float32), weights.expand(marks.shape))
    total: Tensor = values.reshape(-1, marks.shape[-1]).sum(dim=0)
    return total


def _check_tensors(**values: Any) -> None:
    for kind, value in values.items():
        if not isinstance(value, Tensor):
            raise DataError(
                f"The metric got {kind} of type {type(value).__name__}, not one "
                "tensor. If the model has several outputs, say which each metric is "
                "of: metrics={output: [...]}."
            )


def _extent(values: Tensor) -> list[int]:
    rows, *rest = values.shape
    return [rows, *(size for size in rest if size != 1)]
