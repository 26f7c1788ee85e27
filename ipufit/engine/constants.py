# SPDX-License-Identifier: Apache-2.0
"""Values that a program has baked in, because its code computed with them.

From a module, a loss or a metric a walk goes on to submodules, hooks, and the code of
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
import contextlib
import dis
import enum
import functools
import inspect
import random
import sys
import sysconfig
import types
import warnings
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from itertools import chain, repeat
from operator import is_
from pathlib import Path
from types import CodeType
from typing import (
    Any,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Sequence,
    Tuple,
)

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from ipufit.engine.objective import Objective, StepFunction
from ipufit.engine.weights import checksum, is_counted, unfetched
from ipufit.errors import BakedInWarning, ConfigError
from ipufit.metrics import StreamedMetric

_MACHINERY = ("torch", "ipufit", "poptorch", "numpy")
HOLDERS = ("types", "argparse", "collections")
"""Modules of Python whose classes hold values, and never read them themselves."""
_DATA = ("torch.distributions", *HOLDERS)


@functools.lru_cache(maxsize=None)
def is_library(module_name: str) -> bool:
    """Whether a Python module is installed, and so not the user's to change.

    Args:
        module_name: Full name, as in `function.__module__`.

    Example:
        >>> is_library("torch.nn"), is_library("__main__")
        (True, False)
    """
    root = module_name.partition(".")[0]
    if root == "__main__":
        return False
    if root in _MACHINERY:
        return True
    file = _file_of(root)
    if file is None:
        return root in sys.builtin_module_names
    return any(folder in file.parents for folder in _folders())


@functools.lru_cache(maxsize=None)
def is_machinery(module_name: str) -> bool:
    """Whether a Python module's objects are no values that code computes with.

    Those of Python's own library, torch, numpy, PopTorch and ipufit are: loggers,
    locks, optimisers, generators. Containers, namespaces and distributions aren't.

    Args:
        module_name: Full name, as in `type(value).__module__`.

    Example:
        >>> is_machinery("logging"), is_machinery("types"), is_machinery("transformers")
        (True, False, False)
    """
    if any((module_name + ".").startswith(name + ".") for name in _DATA):
        return False
    root = module_name.partition(".")[0]
    if root in _MACHINERY:
        return True
    file = _file_of(root)
    if file is None:
        return root in sys.builtin_module_names
    standard = Path(sysconfig.get_paths()["stdlib"]).resolve()
    return standard in file.parents and "site-packages" not in file.parts


def _file_of(root: str) -> Path | None:
    """The file or folder of a package; None if it is built in, or made by hand."""
    module: Any = sys.modules.get(root)
    name = getattr(module, "__file__", None)
    folders = list(getattr(module, "__path__", ()))
    if name is None and not folders:
        return None
    return Path(name or folders[0]).resolve()


@functools.lru_cache(maxsize=None)
def _folders() -> list[Path]:
    """Folders of Python's own library and of installed packages."""
    paths = sysconfig.get_paths()
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    return sorted({Path(paths[kind]).resolve() for kind in kinds})


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


PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(np.generic, np.dtype, enum.Enum),
)
"""Values that are recorded as they are."""


@dataclass(frozen=True, eq=False)
class Identity:
    """A value that equals only itself."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __repr__(self) -> str:
        if isinstance(self.value, torch.nn.Parameter):  # of PopTorch's class, perhaps
            return "a parameter"
        if isinstance(self.value, (Tensor, torch.nn.Module)):
            return f"a {type(self.value).__name__}"
        text = repr(self.value)
        return text if len(text) <= 60 else f"a {type(self.value).__name__}"


@dataclass(frozen=True)
class SameAs:
    """A value that was reached by another path before."""

    path: str

    def __repr__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Contents:
    """A constant tensor or array by its checksum, or a container by its kind."""

    kind: str
    checksum: int = 0

    def __repr__(self) -> str:
        return self.kind


NOTHING = Contents("missing")
"""Record of a value that isn't there."""


@dataclass(frozen=True, eq=False)
class Elements:
    """The elements of a large container, compared by identity or as plain values."""

    kind: type
    values: tuple[Any, ...]

    @classmethod
    def of(cls, container: Any) -> Elements:
        """Record the elements of a container; of a mapping the keys and the values.

        Example:
            >>> Elements.of([1, 2]) == Elements.of([1, 3])
            False
        """
        is_mapping = isinstance(container, collections.abc.Mapping)
        values = container.values() if is_mapping else ()
        return cls(type(container), (*container, *values))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Elements) or len(other.values) != len(self.values):
            return False
        return all(
            mine is its or (type(mine) is type(its) in PLAIN and mine == its)
            for mine, its in zip(self.values, other.values)
        )

    def __repr__(self) -> str:
        return f"a {self.kind.__name__} of {len(self.values)} values"


def checksum_of(value: Any) -> int:
    """The CRC-32 of the values of a tensor or an array.

    Example:
        >>> checksum_of(np.zeros(2)) == checksum_of(np.ones(2))
        False
    """
    if isinstance(value, Tensor):
        return checksum(value)
    values: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return zlib.crc32(values)


def version_of(tensor: Tensor) -> int:
    """Number of changes of a tensor in place, without fetching a wrapped one.

    Example:
        >>> tensor = torch.zeros(2)
        >>> _ = tensor.add_(1)
        >>> version_of(tensor)
        1
    """
    return int(unfetched(tensor, "_version"))


def scalar_dtype(buffer: Any) -> torch.dtype | None:
    """The dtype of a 0-d buffer, without fetching a wrapped one; None for all else.

    Example:
        >>> scalar_dtype(torch.tensor(0.5)), scalar_dtype(torch.ones(2))
        (torch.float32, None)
    """
    if not issubclass(type(buffer), Tensor) or unfetched(buffer, "ndim"):
        return None
    dtype: torch.dtype = unfetched(buffer, "dtype")
    return dtype


MISSING: Any = object()
"""Target of a reference that leads nowhere."""


class Reference(NamedTuple):
    """A way from one object to another.

    Attributes:
        owner: A mapping, or an object with attributes.
        name: A key of the mapping, or the name of an attribute.
        target: The object that was there.
    """

    owner: Any
    name: Any
    target: Any


class References:
    """References, and the objects that they led to.

    Args:
        items: References by keys of mappings, to `MISSING` where there is no such key.
        attributes: References by attributes of objects.
        contents: Containers that count as a whole, and the objects in them.

    Example:
        >>> settings = {"k": 1.0}
        >>> references = References([Reference(settings, "k", settings["k"])], [], [])
        >>> references.are_unmoved()
        True
        >>> settings["k"] = 2.0
        >>> references.are_unmoved()
        False
    """

    def __init__(
        self,
        items: Iterable[Reference],
        attributes: Sequence[Reference],
        contents: Sequence[tuple[Any, tuple[Any, ...]]],
    ) -> None:
        in_dicts: list[Reference] = []
        self._others: list[Reference] = []  # mappings with a `get` of their own
        for item in items:
            is_dict = type(item.owner) in (dict, OrderedDict)
            (in_dicts if is_dict else self._others).append(item)
        self._dicts, self._keys, self._values = _columns(in_dicts)
        self._owners, self._names, self._attributes = _columns(attributes)
        self._containers = [container for container, _ in contents]
        self._lengths = [len(elements) for _, elements in contents]
        self._elements = [one for _, elements in contents for one in elements]

    def are_unmoved(self) -> bool:
        """Whether every reference leads to the object that it led to."""
        items = map(dict.get, self._dicts, self._keys, repeat(MISSING))
        attributes = map(getattr, self._owners, self._names, repeat(MISSING))
        elements = chain.from_iterable(self._containers)
        return (
            all(map(is_, items, self._values))
            and all(map(is_, attributes, self._attributes))
            and list(map(len, self._containers)) == self._lengths
            and all(map(is_, elements, self._elements))
            and all(get_item(owner, key) is one for owner, key, one in self._others)
        )


def get_item(mapping: Any, key: Any) -> Any:
    """The value of a key of a mapping, or `MISSING`.

    A class of dicts may have a `get` with other arguments.

    Example:
        >>> get_item({"k": 1.0}, "k")
        1.0
    """
    get = dict.get if isinstance(mapping, dict) else type(mapping).get
    return get(mapping, key, MISSING)


def _columns(
    references: Sequence[Reference],
) -> tuple[list[Any], list[Any], list[Any]]:
    return (
        [reference.owner for reference in references],
        [reference.name for reference in references],
        [reference.target for reference in references],
    )


_BY_NAME = ("getattr", "hasattr")
_COMPUTED = frozenset(
    {"vars", "eval", "exec", "globals", "locals", "__dict__"}
    | {"attrgetter", "__getattribute__"}
)
"""Names whose use lets code read attributes by names that aren't in it."""

_DUPLICATES = ("DUP_TOP", "COPY")
"""Instructions that begin `self.calls += 1`: the assignment needs the object again."""


@dataclass(frozen=True)
class CodeNames:
    """The names that code reads, in functions defined inside too.

    Attributes:
        variables: Globals, and built-ins, which can't be told apart here.
        attributes: Attributes of any object. One that is only counted up
            (`self.calls += 1`), put into (`self.seen["x"] = x`), or read after it was
            set anew (`self.hidden = ...`) isn't among them: no result depends on its
            old value.
        modules: Modules that the code imports.
        is_open: Whether the code may read attributes by names that it computes.
    """

    variables: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]
    is_open: bool


_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_NO_STEPS = ("PRECALL", "CACHE", "PUSH_NULL", "EXTENDED_ARG")


@functools.lru_cache(maxsize=4096)
def names_read(code: CodeType) -> CodeNames:
    """Collect the names that the code of a function reads.

    Example:
        >>> def scaled(self, x):
        ...     self.calls += 1
        ...     return x * self.scale * FACTOR
        >>> names = names_read(scaled.__code__)
        >>> sorted(names.variables), sorted(names.attributes)
        (['FACTOR'], ['scale'])
    """
    variables: set[str] = set()
    modules: set[str] = set()
    attributes: set[str] = set()
    is_open = False
    before = ""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _NO_STEPS]
    own = _set_anew(code, instructions)
    for index, instruction in enumerate(instructions):
        kind, name = instruction.opname, instruction.argval
        if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
            variables.add(name)
            if name in _BY_NAME:
                given = _constant_name(instructions[index + 1 :])
                is_open |= given is None
                attributes.update(() if given is None else (given,))
        elif kind in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            is_own = own.get(name, index) < index and (
                _variable(instructions[index - 1]) == code.co_varnames[0]
            )
            is_filled = _is_filled(instructions[index + 1 : index + 3])
            if not (before in _DUPLICATES or is_own or is_filled):
                attributes.add(name)
        elif kind == "IMPORT_NAME":
            modules.add(name)
        before = kind
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = names_read(constant)
            variables |= inner.variables
            attributes |= inner.attributes
            modules |= inner.modules
            is_open |= inner.is_open
    is_open |= bool(_COMPUTED & (variables | attributes))
    return CodeNames(
        frozenset(variables), frozenset(attributes), frozenset(modules), is_open
    )


def _set_anew(code: CodeType, instructions: list[dis.Instruction]) -> dict[str, int]:
    """Find attributes of the first argument that code sets before it branches.

    Returns:
        Positions of the instructions, by the attributes' names.
    """
    first = code.co_varnames[0] if code.co_argcount else None
    if first is None or getattr(
        code, "co_exceptiontable", None
    ):  # an error may leave it
        return {}
    if any(
        one.opname.startswith(("STORE_FAST", "DELETE_FAST")) and first in _names(one)
        for one in instructions
    ):
        return {}
    found: dict[str, int] = {}
    for index, one in enumerate(instructions):
        if one.opcode in _JUMPS or one.opname == "YIELD_VALUE":
            break
        if one.opname == "STORE_ATTR" and _variable(instructions[index - 1]) == first:
            found.setdefault(one.argval, index)
    return found


def _is_filled(following: list[dis.Instruction]) -> bool:
    """Whether a loaded object is only put into, under a plain key."""
    names = [one.opname for one in following]
    return names[1:] == ["STORE_SUBSCR"] and names[0].startswith("LOAD_")


def _variable(instruction: dis.Instruction) -> str | None:
    """The variable that an instruction loads last; None if it loads none."""
    names = _names(instruction)
    return names[-1] if instruction.opname.startswith("LOAD_FAST") and names else None


def _names(instruction: dis.Instruction) -> tuple[str, ...]:
    """One variable, or the two that newer Pythons load at once."""
    value = instruction.argval
    return value if isinstance(value, tuple) else (value,)


def _constant_name(following: list[dis.Instruction]) -> str | None:
    """The name in `getattr(x, "name")`, with a plain default or none; else None."""
    call = next((i for i, one in enumerate(following) if _is_call(one)), None)
    num_given = following[call].arg if call is not None else None
    if call is None or num_given not in (2, 3):
        return None
    name, *default = following[call + 1 - num_given : call]
    is_plain = name.opname == "LOAD_CONST" and isinstance(name.argval, str)
    is_simple = all(one.opname.startswith("LOAD_") for one in default)
    return name.argval if is_plain and is_simple else None


def _is_call(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith("CALL")


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


class ReachableValues:
    """A record of all values that code can reach.

    Args:
        roots: Modules and functions, by their names in messages.

    Attributes:
        is_complete: Whether the walk through the code met none of its bounds.

    Example:
        >>> import torch
        >>> module = torch.nn.Dropout(0.5)
        >>> before = ReachableValues({"module": module})
        >>> module.p = 0.25
        >>> before.are_unmoved(), before.difference(ReachableValues({"module": module}))
        (False, ('module.p', 0.5, 0.25))
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        names, is_open = ENTRIES, False
        while True:  # each name that code reads may lead to more code
            walk = CodeWalk(names, is_open)
            walk.go(roots)
            if walk.names == names and walk.is_open == is_open:
                break
            names, is_open = frozenset(walk.names), walk.is_open
        self.is_complete = walk.is_complete
        self._values = walk.values
        self._checks, self._thorough_checks = walk.checks, walk.thorough_checks
        self._references = References(walk.items, walk.attributes, walk.contents)

    def are_unmoved(self, *, thoroughly: bool = False) -> bool:
        """Whether every object is where it was.

        Args:
            thoroughly: Compare the contents of constants and of large containers too.
        """
        return (
            self._references.are_unmoved()
            and _hold(self._checks)
            and (not thoroughly or _hold(self._thorough_checks))
        )

    def difference(self, now: ReachableValues) -> tuple[str, Any, Any] | None:
        """The first value that differs: its path, before and now; None if none does."""
        return next(self.differences(now), None)

    def differences(self, now: ReachableValues) -> Iterator[tuple[str, Any, Any]]:
        """All values that differ: their paths, before and now."""
        for path in {**self._values, **now._values}:
            was, new = self._values.get(path, NOTHING), now._values.get(path, NOTHING)
            if was is not new and not (type(was) is type(new) and _equal(was, new)):
                yield path, was, new


def _hold(checks: Iterable[Check]) -> bool:
    return all(read(holder) == recorded for read, holder, recorded in checks)


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)


Roots = Mapping[str, Any]
"""Modules and functions that are traced, by their names in messages."""


def roots_of(
    module: torch.nn.Module,
    objective: Objective | None = None,
    step: StepFunction | None = None,
) -> Roots:
    """Collect the modules and functions that a program traces.

    Args:
        objective: Losses and metrics of a training program. Streamed metrics aren't
            traced.
        step: Function that an inference program calls in the module's place.

    Example:
        >>> list(roots_of(torch.nn.Linear(2, 1)))
        ['module']
    """
    roots: dict[str, Any] = {"module": module}
    if objective is not None and objective.steps is not None:
        step = objective.steps.training
    if step is not None:
        roots.update(_roots_of_step(step))
    if objective is not None:
        for _, loss in objective.losses:
            roots[_name(loss.function)] = loss.function
        for measure in objective.measures:
            if not isinstance(measure.metric, StreamedMetric):
                roots[f"metric {measure.name}"] = measure.metric
    return roots


def _roots_of_step(step: StepFunction) -> Roots:
    """A function; or of a method its code, and the model with the attributes."""
    method = getattr(step, "method", step)
    if not inspect.ismethod(method):
        return {_name(step): step}
    return {"model": method.__self__, f"model.{method.__name__}": method.__func__}


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


class BakedInValues:
    """All values that the code of a program could reach when it was traced.

    `forward`, losses and metrics run once in Python. What they read of numbers,
    strings, containers and functions is a part of the program, which never sees a
    change of them. The module says where they are looked for.

    Args:
        roots: Modules and functions that were traced.

    Example:
        >>> module = torch.nn.Dropout(0.5)
        >>> values = BakedInValues({"module": module})
        >>> module.p = 0.25
        >>> values.check()
        Traceback (most recent call last):
        ipufit.errors.ConfigError: module.p was 0.5 when the model was compiled ...
    """

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._values = ReachableValues(roots)

    @property
    def is_complete(self) -> bool:
        """Whether every value was recorded; else `compile()` has to build anew."""
        return self._values.is_complete

    def changed(self, *, thoroughly: bool = True) -> tuple[str, Any, Any] | None:
        """The first value that has changed: path, old and new; None if none has.

        Args:
            thoroughly: Compare the contents of large constants too.
        """
        if self._values.are_unmoved(thoroughly=thoroughly):
            return None
        now = ReachableValues(self._roots)
        change = self._values.difference(now)
        if change is None:  # new objects have the same values
            self._values = now
        return change

    def check(self) -> None:
        """Refuse to go on with other values than the program has baked in.

        Raises:
            ConfigError: A value has changed; the message has its path.
        """
        if self._values.are_unmoved():
            return
        change = self.changed()
        if change is not None:
            path, old, new = change
            now = f"another {repr(new)[2:]}" if repr(old) == repr(new) else repr(new)
            raise ConfigError(
                f"{path} was {old!r} when the model was compiled and is {now} "
                "now: the compiled program has the old value baked in. Change it "
                "between fits, pass it as an input, or make it a 0-d buffer "
                "(register_buffer), which may change at any time."
            )

    def retake(self) -> None:
        """Record the values as they are now."""
        self._values = ReachableValues(self._roots)


@contextlib.contextmanager
def changes_accepted(others: Iterable[BakedInValues]) -> Iterator[None]:
    """Have what a trace changes, such as a counter, be no change for other programs.

    Args:
        others: Baked-in values of the programs that aren't traced.
    """
    current = [one for one in others if one.changed() is None]
    try:
        yield
    finally:
        for one in current:
            one.retake()


@contextlib.contextmanager
def changed_numbers_warned(roots: Roots) -> Iterator[None]:
    """Warn of numbers that `forward` both reads and changes while it is traced.

    Args:
        roots: Modules and functions that are traced.

    Warns:
        BakedInWarning: Such a number has changed.
    """
    before = ReachableValues(roots)
    yield
    for path, old, new in before.differences(ReachableValues(roots)):
        if {type(old), type(new)} <= {int, float}:
            warnings.warn(
                f"forward changes {path} (from {old} to {new}) and reads it. It runs "
                "once, when the program is compiled: the value of that time is baked "
                "in, and every batch is computed with it. Make it a 0-d buffer that a "
                "callback changes, or pass it as an input.",
                BakedInWarning,
                stacklevel=2,
            )


@contextlib.contextmanager
def random_draws_warned() -> Iterator[None]:
    """Warn of random numbers that code draws in Python while it is traced.

    Warns:
        BakedInWarning: It draws from Python's or NumPy's global generator.
    """
    before = _generators()
    yield
    drawn = [name for name, state in _generators().items() if state != before[name]]
    if drawn:
        warnings.warn(
            f"forward draws random numbers from {' and '.join(drawn)}. It runs once, "
            "when the program is compiled: the numbers of that time are baked in, and "
            "every batch is computed with them. Draw with torch, as in torch.rand(1, "
            "device=x.device), which a device does for each micro-batch, or pass the "
            "numbers as an input.",
            BakedInWarning,
            stacklevel=2,
        )


def _generators() -> dict[str, Any]:
    numpys: Any = np.random.get_state()
    return {
        "Python's random": random.getstate(),
        "numpy.random": (numpys[1].tobytes(), *numpys[2:]),
    }


_SAMPLERS = ("sample", "rsample", "sample_n")


@contextlib.contextmanager
def host_samples_warned(module: torch.nn.Module) -> Iterator[None]:
    """Warn of distributions of a module that are sampled while it is traced.

    A distribution that the module has had before has its parameters on the host, and
    so has what is sampled of it: PopTorch traces one sample, which is a constant. One
    that `forward` makes is sampled by the device.

    Args:
        module: The user's module; attributes of its submodules count.

    Warns:
        BakedInWarning: `forward` samples such a distribution.
    """
    owned = dict(_distributions(module))
    if not owned:
        yield
        return
    sampled: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for path, distribution in owned.items():
            for name in _SAMPLERS:
                stack.enter_context(_watched(distribution, name, path, sampled))
        yield
    for path, kind in sampled.items():
        warnings.warn(
            f"forward samples {path}, a {kind} that was made before on the host. It "
            "runs once, when the program is compiled: that one sample is baked in, and "
            f"every batch is computed with it. Make the {kind} in forward, as in "
            "torch.distributions.Uniform(0.0, 1.0).sample(), and the device draws for "
            "each micro-batch; or pass the numbers as an input.",
            BakedInWarning,
            stacklevel=2,
        )


def _distributions(module: torch.nn.Module) -> Iterator[tuple[str, Distribution]]:
    for path, part in module.named_modules(prefix="module"):
        for name, value in vars(part).items():
            if isinstance(value, Distribution):
                yield f"{path}.{name}", value


@contextlib.contextmanager
def _watched(
    distribution: Distribution, name: str, path: str, sampled: dict[str, str]
) -> Iterator[None]:
    """Note calls of a method of one object, which has it as an attribute meanwhile."""
    own: dict[str, Any] = vars(distribution)
    before = own.get(name)
    method: Callable[..., Any] = getattr(distribution, name)

    @functools.wraps(method)
    def noted(*args: Any, **kwargs: Any) -> Any:
        sampled[path] = type(distribution).__name__
        return method(*args, **kwargs)

    own[name] = noted
    try:
        yield
    finally:
        if before is None:
            own.pop(name, None)
        else:
            own[name] = before
