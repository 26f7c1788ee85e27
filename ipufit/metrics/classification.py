# SPDX-License-Identifier: Apache-2.0
"""Accuracies: which samples were classified right, one value each."""

from __future__ import annotations

import torch
from torch import Tensor

from ipufit.errors import DataError


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Right or wrong, by the kind of problem that the shapes tell.

    The rule is Keras's for `"accuracy"`: one output per sample is binary; targets
    without the class axis are class indices; else they are one-hot.

    Args:
        outputs: Scores `[N, C]`, or `[N]` or `[N, 1]` logits; class axis last.
        targets: Indices `[N]` or `[N, 1]`, one-hot `[N, C]`, or 0 and 1.

    Returns:
        1.0 or 0.0 per sample (per position for outputs of more axes).

    Example:
        >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        tensor([1., 0.])
    """
    if outputs.dim() == 1 or outputs.shape[-1] == 1:
        return binary_accuracy(outputs, targets)
    if targets.dim() < outputs.dim() or targets.shape[-1] == 1:
        return sparse_categorical_accuracy(outputs, targets)
    return categorical_accuracy(outputs, targets)


def sparse_categorical_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether the highest score is that of the target's index.

    Args:
        outputs: Scores `[..., C]`.
        targets: Indices `[...]` or `[..., 1]`.

    Returns:
        1.0 or 0.0 per sample.

    Example:
        >>> sparse_categorical_accuracy(torch.eye(3), torch.tensor([0, 1, 1]))
        tensor([1., 1., 0.])
    """
    predicted = outputs.argmax(dim=-1)
    return _agreement(predicted, targets.reshape(predicted.shape))


def categorical_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether the highest score is that of the one-hot target.

    Args:
        outputs: Scores `[..., C]`.
        targets: One-hot or probabilities `[..., C]`.

    Returns:
        1.0 or 0.0 per sample.

    Raises:
        DataError: The shapes differ.

    Example:
        >>> categorical_accuracy(torch.eye(2), torch.eye(2))
        tensor([1., 1.])
    """
    if outputs.shape != targets.shape:
        raise DataError(
            f"categorical_accuracy needs one-hot targets of the outputs' shape "
            f"{tuple(outputs.shape)}, got {tuple(targets.shape)}. For class indices "
            "use 'sparse_categorical_accuracy'."
        )
    return _agreement(outputs.argmax(dim=-1), targets.argmax(dim=-1))


def binary_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether a logit's sign is that of a target of 0 or 1.

    Logits, as torch's binary losses take them: the threshold is 0, which is a
    probability of one half.

    Args:
        outputs: Logits `[N]` or `[N, 1]`.
        targets: 0 or 1, as many.

    Returns:
        1.0 or 0.0 per sample.

    Example:
        >>> binary_accuracy(torch.tensor([-2.0, 3.0]), torch.tensor([0, 0]))
        tensor([1., 0.])
    """
    positive = outputs.gt(0)
    return _agreement(positive, targets.reshape(positive.shape).gt(0.5))


def _agreement(a: Tensor, b: Tensor) -> Tensor:
    agreement: Tensor = a.eq(b).to(torch.float32)
    return agreement
