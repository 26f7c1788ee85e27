# SPDX-License-Identifier: Apache-2.0
"""Joins micro-batches to combined batches."""

from __future__ import annotations

from typing import Any, Iterable, Iterator

import torch

from ipufit.emulator._ground.custom_args import (
    flattenTensorStructure,
    reconstructTensorStructure,
)


def combine_micro_batches(
    batches: Iterable[Any], num_combined: int, *, drop_last: bool
) -> Iterator[Any]:
    """Concatenate every `num_combined` micro-batches along dimension 0.

    Args:
        batches: Micro-batches of one structure.
        num_combined: Micro-batches per combined batch.
        drop_last: Whether an incomplete group at the end is dropped.

    Yields:
        Structures like those of the micro-batches; leaves that aren't tensors are
        those of the first one.

    Example:
        >>> batches = [[torch.tensor([i])] for i in range(3)]
        >>> list(combine_micro_batches(batches, 2, drop_last=False))
        [[tensor([0, 1])], [tensor([2])]]
    """
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if len(group) == num_combined:
            yield _concatenate(group)
            group = []
    if group and not drop_last:
        yield _concatenate(group)


def _concatenate(group: list[Any]) -> Any:
    leaves = [list(flattenTensorStructure(batch, group[0])) for batch in group]
    return reconstructTensorStructure(
        group[0], [torch.cat(tensors) for tensors in zip(*leaves)]
    )
