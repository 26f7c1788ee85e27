# SPDX-License-Identifier: Apache-2.0
"""The tensors among the arguments of calls that are watched, and their names."""

from __future__ import annotations

from typing import Any, Iterator

from torch import Tensor

_PREFIX = "module."
"""Where a `Step` has the user's module."""


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts.

    Example:
        >>> import torch
        >>> list(tensors_of((torch.ones(1), {"other": [torch.zeros(1)]}, 3)))
        [tensor([1.]), tensor([0.])]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for element in value.values():
            yield from tensors_of(element)
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from tensors_of(element)


def short(name: str) -> str:
    """What the user calls a weight or buffer of a step.

    Example:
        >>> short("module.layer.weight"), short("losses.0.beta")
        ('layer.weight', 'losses.0.beta')
    """
    return name[len(_PREFIX) :] if name.startswith(_PREFIX) else name
