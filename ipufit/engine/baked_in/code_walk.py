# SPDX-License-Identifier: Apache-2.0
"""A walk through all values that code can reach, and computes with when it is traced.

From a module, a loss or a metric the walk goes on to submodules, hooks, and the code of
`forward`; from code to the globals, closure variables, defaults and attributes that it
names, and from there into objects, containers, functions and classes. An attribute that
no code names is left alone, so that a callback may count in a module what it likes.

The code of installed packages isn't read. Of their modules and objects all public
attributes count instead. The walk ends `DEPTH` steps away from where it began, and
after `SIZE` values.
"""

from __future__ import annotations

import collections
import collections.abc
import functools
import sys
import types
from typing import Any, Callable, Iterable, Mapping, Tuple

import numpy as np
import torch
from torch import Tensor

from ipufit.engine.weights.counters import is_counted
from ipufit.engine.weights.wrapping import unfetched

from .attributes import (
    computed_names,
    is_read_by_library,
    overridable_names,
    public_names,
)
from .code_names import names_read
from .origins import is_library, is_machinery
from .records import (
    PLAIN,
    Contents,
    Elements,
    Identity,
    SameAs,
    checksum_of,
    scalar_dtype,
    version_of,
)
from .references import MISSING, Reference, get_item

DEPTH = 16
SIZE = 20_000
SMALL_BYTES = 1 << 16
"""Arrays of numpy up to this size are looked at in every call."""
LARGE = 256
"""Containers of more elements are compared as a whole, and between runs only."""
LARGE_BYTES = 1 << 24
"""Tensors and arrays of more bytes are compared by identity only."""

ENTRIES = frozenset({"forward", "sums"})
"""Methods that ipufit and torch call."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_TORCHS = {"training", *vars(torch.nn.Module())}
"""Attributes that torch itself keeps in a module."""
_NOT_IN_FORWARD = frozenset(
    f"__{name}__"
    for name in (
        *("init", "new", "del", "repr", "str", "format", "dir", "copy", "deepcopy"),
        *("init_subclass", "class_getitem", "subclasshook", "set_name"),
        *("reduce", "reduce_ex", "getstate", "setstate"),
    )
)
"""Methods of a class that `forward` doesn't call."""

Check = Tuple[Callable[[Any], Any], Any, Any]
"""A function, its argument, and the result that it gave."""


class CodeWalk:
    """One walk through code, by the names of attributes that are known so far.

    Args:
        names: Attributes that code reads.
        is_open: Whether code may read attributes of other names too.

    Attributes:
        names: The names given, and those found on the way.
        is_open: Whether it was so at the beginning, or because of code on the way.
        values: Records of the values that were found, by path.
        items: References by the keys of mappings.
        attributes: References by the attributes of objects.
        contents: Containers that count as a whole, and the objects in them.
        checks: Cheap checks, to be made before every call.
        thorough_checks: Checks of large contents, to be made between runs.
        is_complete: Whether no bound was met.
    """

    def __init__(self, names: frozenset[str], is_open: bool) -> None:
        self.names = set(names)
        self.is_open = is_open
        self.values: dict[str, Any] = {}
        self.items: list[Reference] = []
        self.attributes: list[Reference] = []
        self.contents: list[tuple[Any, tuple[Any, ...]]] = []
        self.checks: list[Check] = []
        self.thorough_checks: list[Check] = []
        self.is_complete = True
        # The objects are kept too, because ids of dead ones are used again.
        self._visited: dict[int, tuple[str, Any]] = {}
        self._followed: set[tuple[int, Any]] = set()
        self._classes: set[type] = set()
        self._weights: set[int] = set()

    def go(self, roots: Mapping[str, Any]) -> None:
        """Walk from each of the roots.

        Args:
            roots: Modules and functions, by their names in messages.
        """
        for root in roots.values():
            if isinstance(root, torch.nn.Module):
                self._weights.update(map(id, root.parameters()))
                self._weights.update(
                    id(b) for b in root.buffers() if scalar_dtype(b) is None
                )
        for path, root in roots.items():
            self._visit(path, root, 0)
            is_own = is_machinery(type(root).__module__) and hasattr(root, "__dict__")
            if is_own and not isinstance(root, torch.nn.Module):  # such as a metric
                for name in public_names(root):
                    self._item(vars(root), name, f"{path}.{name}", 1)

    # Steps ------------------------------------------------------------------

    def _item(self, mapping: Any, key: Any, path: str, depth: int) -> None:
        if (id(mapping), key) not in self._followed:
            self._followed.add((id(mapping), key))
            value = get_item(mapping, key)
            self.items.append(Reference(mapping, key, value))
            if value is not MISSING:
                self._visit(path, value, depth)

    def _attribute(self, owner: Any, name: str, path: str, depth: int) -> None:
        try:
            value = getattr(owner, name)
        except (AttributeError, ValueError):  # an empty slot, an empty cell
            return
        self.attributes.append(Reference(owner, name, value))
        self._visit(path, value, depth)

    def _whole(self, container: Iterable[Any]) -> None:
        self.contents.append((container, tuple(container)))

    def _visit(self, path: str, value: Any, depth: int) -> None:
        while path in self.values:  # a variable of another function
            path += "'"
        if issubclass(type(value), PLAIN):  # isinstance() would touch a wrapped weight
            self.values[path] = value
            return
        before = self._visited.get(id(value))
        if before is not None:
            self.values[path] = SameAs(before[0])
            return
        self._visited[id(value)] = path, value
        self.values[path] = Identity(value)
        if depth > DEPTH or len(self.values) > SIZE:
            self.is_complete = False
            return
        for kind, step in _STEPS:
            if isinstance(value, kind):
                step(self, path, value, depth + 1)
                return
        if not is_machinery(type(value).__module__):
            self.values[path] = Contents(f"a {type(value).__name__}")
            self._members(path, value, depth + 1)

    # Kinds of values ---------------------------------------------------------

    def _tensor(self, path: str, tensor: Tensor, _: int) -> None:
        is_weight = id(tensor) in self._weights
        is_parameter = issubclass(type(tensor), torch.nn.Parameter)
        if is_parameter or (is_weight and _moves(tensor)):
            return
        is_plain = is_weight or type(tensor) is Tensor
        is_here = tensor.device.type == "cpu" and tensor.layout == torch.strided
        if not (is_plain and is_here) or tensor.is_inference():
            return
        self.checks.append((version_of, tensor, version_of(tensor)))
        self._constant(path, tensor, tensor.numel() * tensor.element_size())

    def _array(self, path: str, array: Any, _: int) -> None:
        if array.dtype.hasobject:
            return
        if array.nbytes <= SMALL_BYTES:
            self.checks.append((checksum_of, array, checksum_of(array)))
        self._constant(path, array, array.nbytes)

    def _constant(self, path: str, value: Any, num_bytes: int) -> None:
        if num_bytes > LARGE_BYTES:
            self.is_complete = False
            return
        checksum = checksum_of(value)
        self.thorough_checks.append((checksum_of, value, checksum))
        # A buffer's class is PopTorch's while a program holds it.
        name = "Tensor" if issubclass(type(value), Tensor) else type(value).__name__
        kind = f"{name} of {value.dtype} {list(value.shape)}"
        self.values[path] = Contents(kind, checksum)

    def _module(self, path: str, module: torch.nn.Module, depth: int) -> None:
        parts = vars(module)
        self._members(path, module, depth, _TORCHS)
        for name in ("_modules", "_parameters", "_buffers"):
            members = parts.get(name)
            if not isinstance(members, dict):  # the module is a compiled script
                continue
            self._whole(members)
            for key, member in members.items():
                dtype = scalar_dtype(member) if name == "_buffers" else None
                if dtype is not None:  # its value goes to the device with every call
                    self.checks.append((_scalar_dtype_in, (members, key), dtype))
                    self.values[f"{path}.{key}"] = Contents(f"0-d buffer of {dtype}")
                else:
                    self._item(members, key, f"{path}.{key}", depth)
        for name in _HOOKS:
            hooks = parts.get(name, {})
            self._whole(hooks)
            for key in hooks:
                self._item(hooks, key, f"{path}'s hook {key}", depth)

    def _function(self, path: str, function: Any, depth: int) -> None:
        variables = function.__code__.co_freevars
        for name, cell in zip(variables, function.__closure__ or ()):
            self._attribute(cell, "cell_contents", f"closure variable {name}", depth)
        for name in ("__code__", "__defaults__"):
            self.attributes.append(Reference(function, name, getattr(function, name)))
        named = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = function.__defaults__ or ()
        for name, value in zip(named[len(named) - len(defaults) :], defaults):
            self._visit(f"{function.__name__}'s default {name}", value, depth)
        for name in function.__kwdefaults__ or ():
            default = f"{function.__name__}'s default {name}"
            self._item(function.__kwdefaults__, name, default, depth)
        if is_library(function.__globals__.get("__name__", "__main__")):
            return
        self.values[path] = Identity(function.__code__)
        names = names_read(function.__code__)
        self.names |= names.attributes
        self.is_open |= names.is_open
        for name in sorted(names.variables):
            if name in function.__globals__:
                self._item(function.__globals__, name, f"global {name}", depth)
        for name in sorted(names.modules):
            self._visit(name, sys.modules.get(name), depth)

    def _method(self, path: str, method: types.MethodType, depth: int) -> None:
        self.values[path] = Contents("a method")
        self._visit(f"{path}.__self__", method.__self__, depth)
        self._visit(f"{path}.__func__", method.__func__, depth)

    def _partial(self, path: str, partial: Any, depth: int) -> None:
        self.values[path] = Contents("a partial")
        for name in ("func", "args", "keywords"):
            self._visit(f"{path}.{name}", getattr(partial, name), depth)

    def _python_module(self, path: str, module: Any, depth: int) -> None:
        if not is_library(module.__name__):
            for name in sorted(self.names & vars(module).keys()):
                self._item(vars(module), name, f"{path}.{name}", depth)

    def _class(self, path: str, cls: type, depth: int) -> None:
        for base in cls.__mro__:
            if is_library(base.__module__) or base in self._classes:
                continue
            self._classes.add(base)
            for name, member in list(vars(base).items()):
                is_special = name.startswith("__") and name.endswith("__")
                is_code = isinstance(member, types.FunctionType)
                if is_special:
                    is_read = is_code and name not in _NOT_IN_FORWARD
                else:
                    is_read = name in self.names or self.is_open
                if is_read:
                    self._item(vars(base), name, f"{base.__name__}.{name}", depth)

    def _descriptor(self, path: str, descriptor: Any, depth: int) -> None:
        for name in ("fget", "func", "__func__"):
            if hasattr(descriptor, name):
                self._visit(path, getattr(descriptor, name), depth)

    def _mapping(self, path: str, mapping: Any, depth: int) -> None:
        if self._is_large(path, mapping):
            return
        self.values[path] = Contents(f"a {type(mapping).__name__}")
        self._whole(mapping)
        for key in list(mapping):
            self._item(mapping, key, f"{path}[{key!r}]", depth)
        self._members(path, mapping, depth)

    def _sequence(self, path: str, elements: Any, depth: int) -> None:
        if self._is_large(path, elements):
            return
        self.values[path] = Contents(f"a {type(elements).__name__}")
        self._whole(elements)
        for index, element in enumerate(list(elements)):
            self._visit(f"{path}[{index}]", element, depth)
        self._members(path, elements, depth)

    def _set(self, path: str, elements: Any, _: int) -> None:
        if self._is_large(path, elements):
            return
        self._whole(elements)
        if all(isinstance(element, PLAIN) for element in elements):
            self.values[path] = frozenset(elements)

    def _is_large(self, path: str, container: Any) -> bool:
        if len(container) <= LARGE:
            return False
        elements = Elements.of(container)
        self.is_complete &= all(isinstance(value, PLAIN) for value in elements.values)
        self.thorough_checks.append((Elements.of, container, elements))
        self.values[path] = elements
        return True

    def _members(
        self, path: str, value: Any, depth: int, torchs: Iterable[str] = ()
    ) -> None:
        """Visit the attributes of an object, and of its class, that code may read."""
        cls = type(value)
        self._class(cls.__name__, cls, depth)
        own = vars(value) if hasattr(value, "__dict__") else {}
        read = {name for name in own if name in self.names}
        if self.is_open or any(map(is_read_by_library, cls.__mro__)):
            read.update(public_names(value))
        for name in sorted(read - set(torchs)):
            self._item(own, name, f"{path}.{name}", depth)
        for name in overridable_names(value, self.names) - own.keys():
            self.items.append(Reference(own, name, MISSING))
        for base in cls.__mro__:
            for name in getattr(base, "__slots__", ()):
                if name in self.names or self.is_open:
                    self._attribute(value, name, f"{path}.{name}", depth)
        for name in computed_names(value, self.names - own.keys()):
            self._attribute(value, name, f"{path}.{name}", depth)


_STEPS: tuple[tuple[Any, Any], ...] = (
    (Tensor, CodeWalk._tensor),
    (np.ndarray, CodeWalk._array),
    (torch.nn.Module, CodeWalk._module),
    (types.FunctionType, CodeWalk._function),
    (types.MethodType, CodeWalk._method),
    (functools.partial, CodeWalk._partial),
    (types.ModuleType, CodeWalk._python_module),
    (type, CodeWalk._class),
    (
        (property, staticmethod, classmethod, functools.cached_property),
        CodeWalk._descriptor,
    ),
    (collections.abc.Mapping, CodeWalk._mapping),
    ((list, tuple, collections.deque), CodeWalk._sequence),
    ((set, frozenset), CodeWalk._set),
)


def _scalar_dtype_in(place: tuple[Any, str]) -> torch.dtype | None:
    buffers, name = place
    return scalar_dtype(buffers.get(name))


def _moves(buffer: Tensor) -> bool:
    """Whether a buffer's values change by themselves; others are compiled in."""
    is_float: bool = unfetched(buffer, "dtype").is_floating_point
    return is_float or is_counted(buffer)
