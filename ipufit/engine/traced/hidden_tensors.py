# SPDX-License-Identifier: Apache-2.0
"""Refuses outputs with hidden tensors, which would never change."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ipufit._tree import attribute_names
from ipufit.errors import UnsupportedError

_DEPTH = 6
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def refuse_hidden(leaf: Any, path: str) -> None:
    """Refuse an output in which a tensor is hidden.

    A program returns tensors. Whatever else `forward` returns stays as it was when the
    program was traced, so a tensor in it would have the values of tracing in all calls.

    Args:
        leaf: An output that is no tensor.
        path: Name of the output in messages, such as `outputs[0]`.

    Raises:
        UnsupportedError: There is a tensor in it, or it is an iterator, which may
            give one.

    Example:
        >>> refuse_hidden(torch.distributions.Normal(torch.zeros(2), 1.0), "outputs")
        Traceback (most recent call last):
        ipufit.errors.UnsupportedError: forward returns a Normal, with a tensor at ...
    """
    if isinstance(leaf, Iterator):
        hidden: str | None = path
    else:
        hidden = _path_to_tensor(leaf, path, _DEPTH, set())
    if hidden is not None:
        kind = type(leaf).__name__
        where = "" if hidden == path else f", with a tensor at {hidden}"
        raise UnsupportedError(
            f"forward returns a {kind}{where}. A program returns tensors, so those in "
            "it would keep the values of tracing. Return the tensors themselves, in "
            "tuples, lists, dicts, named tuples, data classes, classes of attrs or "
            "SimpleNamespace, and build the object from what predict() gives."
        )


def _path_to_tensor(value: Any, path: str, depth: int, seen: set[int]) -> str | None:
    if isinstance(value, Tensor):
        return path
    if isinstance(value, (*_PLAIN, type, types.ModuleType)) or id(value) in seen:
        return None
    if isinstance(value, torch.nn.Module) or depth == 0:
        return None  # a module's tensors are weights, which it doesn't compute
    seen.add(id(value))
    for step, part in _parts(value):
        found = _path_to_tensor(part, path + step, depth - 1, seen)
        if found is not None:
            return found
    return None


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """The parts of an object, and the text that leads to each."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, Iterable) and hasattr(value, "__len__"):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    if isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or ()):
            if cell != types.CellType():
                yield f" (closure variable {name})", cell.cell_contents
    if isinstance(value, functools.partial):
        yield from ((".args", value.args), (".keywords", value.keywords))
    if isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    for name in attribute_names(value):
        yield f".{name}", getattr(value, name)
