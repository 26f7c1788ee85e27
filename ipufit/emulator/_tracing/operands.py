# SPDX-License-Identifier: Apache-2.0
"""The tensors among the arguments and results of one operation.

Torch nests them in tuples, lists, dicts and slices. This is its own convention;
the structures of a model's inputs and outputs are those of `custom_args`.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments.

    Example:
        >>> import torch
        >>> [t.item() for t in tensors_in(([torch.tensor(1)], {"k": torch.tensor(2)}))]
        [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from tensors_in(element)
    elif isinstance(value, dict):
        for element in value.values():
            yield from tensors_in(element)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def has_tensors(value: Any) -> bool:
    """Whether there is a tensor in nested arguments.

    Example:
        >>> has_tensors([1, (2, 3)])
        False
    """
    return next(tensors_in(value), None) is not None


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Replace the tensors in nested arguments.

    Containers in which nothing changes stay the objects they are, such as the named
    results of torch.

    Example:
        >>> import torch
        >>> map_tensors({"k": [torch.tensor(1), "other"]}, lambda t: t.item())
        {'k': [1, 'other']}
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(v, function) for key, v in value.items()}
    if isinstance(value, (tuple, list)):
        elements = [map_tensors(v, function) for v in value]
        if all(new is old for new, old in zip(elements, value)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*elements)
        return type(value)(elements)
    if isinstance(value, slice):
        return slice(*map_tensors((value.start, value.stop, value.step), function))
    return value


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Replace everything in nested arguments; containers become plain ones.

    Example:
        >>> map_leaves((1, [2, {"k": 3}]), str)
        ('1', ['2', {'k': '3'}])
    """
    if isinstance(value, dict):
        return {key: map_leaves(v, function) for key, v in value.items()}
    if isinstance(value, tuple):
        return tuple(map_leaves(v, function) for v in value)
    if isinstance(value, list):
        return [map_leaves(v, function) for v in value]
    if isinstance(value, slice):
        return slice(*map_leaves((value.start, value.stop, value.step), function))
    return function(value)
