# SPDX-License-Identifier: Apache-2.0
"""Names of attributes that code may read of an object."""

from __future__ import annotations

from typing import Any, Iterable

import torch

from .origins import HOLDERS, is_library, is_machinery


def public_names(value: Any) -> list[str]:
    """Names in the `__dict__` of an object that don't begin with an underscore."""
    names: Iterable[str] = getattr(value, "__dict__", ())
    return [name for name in names if not name.startswith("_")]


def overridable_names(value: Any, names: set[str]) -> set[str]:
    """Names of the class's attributes that an object may come to override by its own.

    Args:
        value: Any object.
        names: Attributes that code reads.
    """
    if not hasattr(value, "__dict__"):
        return set()
    bases = [base for base in type(value).__mro__ if not is_library(base.__module__)]
    found = {name for base in bases for name in names.intersection(vars(base))}
    return found | ({"forward"} if isinstance(value, torch.nn.Module) else set())


def computed_names(value: Any, names: Iterable[str]) -> list[str]:
    """Names of attributes that the `__getattr__` of an object finds somewhere.

    Args:
        value: Any object; modules keep such attributes in ways of their own.
        names: Attributes that code reads, and the object doesn't have itself.
    """
    cls = type(value)
    if not hasattr(cls, "__getattr__") or isinstance(value, torch.nn.Module):
        return []
    return [n for n in sorted(names) if not hasattr(cls, n) and _is_kept(value, n)]


def _is_kept(owner: Any, name: str) -> bool:
    """Whether `__getattr__` gives an object that is kept, and makes no new one."""
    try:
        return getattr(owner, name) is getattr(owner, name)
    except (AttributeError, LookupError, TypeError, ValueError):
        return False


def is_read_by_library(base: type) -> bool:
    """Whether methods of a class are a library's, and may read any attribute."""
    if base in (object, torch.nn.Module):
        return False
    if issubclass(base, torch.nn.Module):
        return is_library(base.__module__)
    origin = base.__module__
    return is_library(origin) and not is_machinery(origin) and origin not in HOLDERS
