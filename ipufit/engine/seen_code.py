# SPDX-License-Identifier: Apache-2.0
"""Whether everything that traced code computes with is looked at.

A program has the values baked in that Python computed with when it was traced. Plain
attributes of modules are looked at (`baked.py`). Values of globals, of closures, of
classes and of objects in attributes are not. Who has changed one calls `compile()` to
have it count, so a program with such code is compiled anew then.
"""

from __future__ import annotations

import types
from typing import Any, Iterator

import torch

from ipufit.metrics import FunctionMetric, StreamedMetric

from .baked import is_plain, own_attributes
from .objective import Objective

_TRUSTED = ("torch", "ipufit", "poptorch", "numpy", "math", "builtins")
_DEPTH = 4


def is_all_seen(module: torch.nn.Module, objective: Objective) -> bool:
    """Whether a program of a module and an objective computes with nothing unseen.

    Args:
        module: The user's.
        objective: Losses and metrics.

    Example:
        >>> from ipufit.engine import resolve_objective
        >>> is_all_seen(torch.nn.Linear(2, 1), resolve_objective("mse"))
        True
    """
    parts: list[Any] = [module, *(loss.function for _, loss in objective.losses)]
    for measure in objective.measures:
        if isinstance(measure.metric, FunctionMetric):
            parts.append(measure.metric.function)
        elif not isinstance(measure.metric, StreamedMetric):  # those stay on the host
            parts.append(type(measure.metric))
    return all(_is_seen(part, _DEPTH) for part in parts)


def _is_seen(value: Any, depth: int) -> bool:
    """Whether whoever uses `value` computes with nothing that isn't looked at."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _TRUSTED
    if isinstance(value, torch.nn.Module):
        return all(_is_seen_layer(part, depth) for part in value.modules())
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        if _home(value) in _TRUSTED:
            return True
        is_followed = isinstance(value, types.FunctionType) and depth > 0
        return is_followed and _is_seen_function(value, depth)  # type: ignore[arg-type,unused-ignore]
    return isinstance(value, torch.dtype)


def _is_seen_layer(layer: torch.nn.Module, depth: int) -> bool:
    if layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
        return False
    if not all(map(is_plain, own_attributes(layer).values())):
        return False
    return all(
        isinstance(member, types.FunctionType) and _is_seen_function(member, depth)
        for kind in type(layer).__mro__
        if _home(kind) not in ("torch", "builtins")
        for name, member in vars(kind).items()
        if name == "forward" or not (name.startswith("__") and name.endswith("__"))
    )


def _is_seen_function(function: types.FunctionType, depth: int) -> bool:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = (function.__defaults__ or (), (function.__kwdefaults__ or {}).values())
    names = set(_names(function.__code__))
    reached = [v for name, v in function.__globals__.items() if name in names]
    return (
        all(is_plain(value) for values in defaults for value in values)
        # The cell of `super()` has the class.
        and all(isinstance(v, type) or _is_seen(v, depth - 1) for v in cells)
        and all(_is_seen(value, depth - 1) for value in reached)
    )


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _home(value: Any) -> str:
    """The package of a function or a class."""
    return str(getattr(value, "__module__", None) or "builtins").partition(".")[0]
