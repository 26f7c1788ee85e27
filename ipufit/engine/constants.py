# SPDX-License-Identifier: Apache-2.0
"""Python values that are compiled into a program, because its code read them.

A walk begins at the module, the losses and the metrics. It follows submodules, hooks
and functions; for a function the globals, closure variables and defaults that its code
reads; for an object the attributes whose names some code reads. An attribute that no
code reads is left out, so that a callback may count in a module.

The code of installed packages isn't read. All public attributes of their layers and
objects are taken instead. The walk ends `DEPTH` steps away from where it began, and
after `SIZE` values.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import enum
import functools
import inspect
import random
import sys
import sysconfig
import types
import zlib
from functools import partial
from pathlib import Path
from types import CodeType
from typing import (
    Any,
    Callable,
    FrozenSet,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Tuple,
)

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from ipufit.engine.objective import Objective, StepFunction
from ipufit.engine.weights import checksum, is_counted, unfetched, weights_of
from ipufit.errors import BakedInWarning, ConfigError, warn
from ipufit.metrics import StreamedMetric

DEPTH = 16
SIZE = 20_000
SMALL_BYTES = 1 << 16
"""Arrays of numpy up to this size are compared before every call."""
LARGE = 256
"""Containers of more elements are compared as a whole, and between runs only."""
LARGE_BYTES = 1 << 24
"""Tensors and arrays of more bytes are compared by identity only."""

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(np.generic, np.dtype, enum.Enum, CodeType),
)
"""Values that are compared by `==`."""


class Contents(NamedTuple):
    """Recorded contents of an object: its kind, and the checksum of a constant."""

    kind: str
    checksum: int = 0

    def __repr__(self) -> str:
        return self.kind


_COMPARED = (*_PLAIN, Contents, frozenset)

_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
_NO_STEPS = ("PRECALL", "CACHE", "PUSH_NULL", "EXTENDED_ARG")
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_COMPUTED = {"vars", "eval", "exec", "globals", "locals", "__dict__"}
_COMPUTED |= {"attrgetter", "__getattribute__"}
"""Names whose use lets code read attributes by names that aren't in it."""

_CONTAINERS = (list, tuple, collections.deque, Mapping, set, frozenset)
_DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property)
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

_MISSING: Any = object()


@functools.lru_cache(maxsize=None)
def _origin(module_name: str) -> str:
    """Classify a Python module by its author.

    Returns:
        "user"; "package" if it is installed; "holder" for modules of Python whose
        objects hold values and never read them; "machinery" for the rest of Python,
        torch, numpy, PopTorch and ipufit, whose objects are no values.
    """
    root = module_name.partition(".")[0]
    if root in ("types", "argparse", "collections"):
        return "holder"
    if (module_name + ".").startswith("torch.distributions."):
        return "package"
    if root in ("torch", "ipufit", "poptorch", "numpy"):
        return "machinery"
    module = sys.modules.get(root)
    files = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    file = next((one for one in files if one), None)
    if root == "__main__" or file is None:
        return "machinery" if root in sys.builtin_module_names else "user"
    folders = Path(file).resolve().parents
    paths = {name: Path(path).resolve() for name, path in sysconfig.get_paths().items()}
    if {paths["purelib"], paths["platlib"]}.intersection(folders):
        return "package"
    if {paths["stdlib"], paths["platstdlib"]}.intersection(folders):
        return "package" if "site-packages" in file else "machinery"
    return "user"


def _reads_any(cls: type) -> bool:
    """Return whether methods of a class are a package's, and may read any attribute."""
    if cls in (object, torch.nn.Module):
        return False
    is_module = issubclass(cls, torch.nn.Module)
    return _origin(cls.__module__) in ("package", "machinery" if is_module else "")


Names = Tuple[FrozenSet[str], FrozenSet[str], bool]


@functools.lru_cache(maxsize=4096)
def names_read(code: CodeType) -> Names:
    """Return the names that the code of a function reads, and of functions inside it.

    Returns:
        Globals and imported modules; attributes of any object; whether the code may
        read attributes by names that it computes. An attribute that is only counted up
        (`self.calls += 1`), put into (`self.seen["x"] = x`), or read after it was set
        (`self.hidden = ...`) isn't included: no result depends on its old value.
    """
    variables: set[str] = set()
    attributes: set[str] = set()
    was_set: set[str] = set()
    is_open = False
    is_straight = not getattr(code, "co_exceptiontable", b"")  # an error may branch too
    steps = [i for i in dis.get_instructions(code) if i.opname not in _NO_STEPS]
    kinds = [step.opname for step in steps]
    for at, (step, kind, before) in enumerate(zip(steps, kinds, ["", *kinds])):
        is_straight = is_straight and step.opcode not in _JUMPS
        if kind in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"):
            variables.add(step.argval)
            if step.argval in ("getattr", "hasattr"):
                name = _constant_name(steps[at + 1 :])
                attributes.add(name)
                is_open |= not name
        elif kind == "STORE_ATTR" and is_straight and before.startswith("LOAD_"):
            was_set.add(step.argval)
        elif kind in _LOADS:
            is_counted_up = before in ("DUP_TOP", "COPY")
            is_filled = "STORE_SUBSCR" in kinds[at + 2 : at + 3]
            if not (is_counted_up or is_filled or step.argval in was_set):
                attributes.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = names_read(constant)
            variables |= inner[0]
            attributes |= inner[1]
            is_open |= inner[2]
    is_open |= not _COMPUTED.isdisjoint(variables | attributes)
    return frozenset(variables), frozenset(attributes), is_open


def _constant_name(following: list[dis.Instruction]) -> str:
    """Return the name in `getattr(x, "name")`, with a plain or no default; else ""."""
    calls = (i for i, one in enumerate(following) if one.opname.startswith("CALL"))
    call = next(calls, 0)
    count = following[call].arg or 0
    given = following[max(call + 1 - count, 0) : call] if count in (2, 3) else []
    if not given or not all(one.opname.startswith("LOAD_") for one in given):
        return ""
    is_constant = given[0].opname == "LOAD_CONST"
    return str(given[0].argval) if is_constant else ""


def _is_plain(value: Any) -> bool:
    return issubclass(type(value), _PLAIN)  # isinstance() would touch a wrapped weight


def _checksum(value: Any) -> int:
    """Return a checksum of a tensor, an array, or the elements of a container."""
    if isinstance(value, Tensor):
        return checksum(value)
    if isinstance(value, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    is_mapping = isinstance(value, Mapping)
    elements = (*value, *value.values()) if is_mapping else value
    texts = [repr(one) if _is_plain(one) else str(id(one)) for one in elements]
    return zlib.crc32("\n".join(texts).encode())


def _ids(container: Iterable[Any]) -> int:
    return hash(tuple(map(id, container)))


def _public_names(value: Any) -> list[str]:
    names: Iterable[str] = getattr(value, "__dict__", ())
    return [name for name in names if not name.startswith("_")]


def _scalar_dtype(buffers: Any, name: str) -> torch.dtype | None:
    """Return the dtype of a 0-d buffer, without fetching it; None for other values."""
    buffer = buffers.get(name)
    if not issubclass(type(buffer), Tensor) or unfetched(buffer, "ndim"):
        return None
    dtype: torch.dtype = unfetched(buffer, "dtype")
    return dtype


_Check = Tuple[Callable[..., Any], Tuple[Any, ...], Any]
"""A function, its arguments, and the result that it gave."""


class _Walk:
    """A walk through code, for a set of attribute names.

    Attributes:
        names: Names that were given, and names found on the way.
        is_open: Whether code may read attributes of other names too.
        is_complete: Whether the walk met no bound.
        values: Values by path: plain ones, `Contents`, and objects, which equal only
            themselves.
        checks: Functions with arguments and results, to compare before every call.
        thorough_checks: Checks of large constants, to compare between runs.
    """

    def __init__(
        self, roots: Mapping[str, Any], names: frozenset[str], *, is_open: bool
    ) -> None:
        self.names = set(names)
        self.is_open = is_open
        self.is_complete = True
        self.values: dict[str, Any] = {}
        self.checks: list[_Check] = []
        self.thorough_checks: list[_Check] = []
        self._visited: dict[int, tuple[str, Any]] = {}  # keeps objects, for their ids
        self._classes: set[type] = set()
        self._followed: set[tuple[int, Any]] = set()
        self._weights: set[int] = set()
        for root in roots.values():
            if isinstance(root, torch.nn.Module):
                self._weights.update(map(id, weights_of(root)))
        for path, root in roots.items():
            self._visit(path, root, 0)
            is_own = _origin(type(root).__module__) == "machinery"  # such as a metric
            if is_own and not isinstance(root, torch.nn.Module):
                for name in _public_names(root):
                    self._item(vars(root), name, f"{path}.{name}", 1)

    def _follow(self, get: Any, owner: Any, key: Any, path: str, depth: int) -> None:
        """Visit an attribute or element of an owner, and record its path."""
        if (id(owner), key) in self._followed:
            return
        self._followed.add((id(owner), key))
        try:
            value = get(owner, key, _MISSING)
        except ValueError:  # an empty cell
            return
        self.checks.append((get, (owner, key, _MISSING), value))
        if value is not _MISSING:
            self._visit(path, value, depth)

    def _item(self, mapping: Any, key: Any, path: str, depth: int) -> None:
        get = dict.get if isinstance(mapping, dict) else type(mapping).get
        self._follow(get, mapping, key, path, depth)

    def _whole(self, container: Any) -> None:
        """Note that a container counts as a whole; keys of a mapping are followed."""
        read: Any = len if isinstance(container, Mapping) else _ids
        self.checks.append((read, (container,), read(container)))

    def _visit(self, path: str, value: Any, depth: int) -> None:
        while path in self.values:  # a variable of another function
            path += "'"
        self.values[path] = value
        if _is_plain(value):
            return
        if id(value) in self._visited:
            self.values[path] = Contents(self._visited[id(value)][0])
            return
        self._visited[id(value)] = path, value
        if depth > DEPTH or len(self.values) > SIZE:
            self.is_complete = False
            return
        depth += 1
        if isinstance(value, Tensor):
            self._tensor(path, value)
        elif isinstance(value, np.ndarray):
            if not value.dtype.hasobject:
                self._constant(path, value, value.nbytes)
        elif isinstance(value, torch.nn.Module):
            self._module(path, value, depth)
        elif isinstance(value, types.FunctionType):
            self._function(path, value, depth)
        elif isinstance(value, types.MethodType):
            self.values[path] = Contents("a method")
            self._visit(f"{path}.__self__", value.__self__, depth)
            self._visit(f"{path}.__func__", value.__func__, depth)
        elif isinstance(value, functools.partial):
            self.values[path] = Contents("a partial")
            for name in ("func", "args", "keywords"):
                self._visit(f"{path}.{name}", getattr(value, name), depth)
        elif isinstance(value, types.ModuleType):
            if _origin(value.__name__) == "user":
                for name in sorted(self.names & vars(value).keys()):
                    self._item(vars(value), name, f"{path}.{name}", depth)
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, _DESCRIPTORS):
            for name in ("fget", "func", "__func__"):
                if hasattr(value, name):
                    self._visit(path, getattr(value, name), depth)
        elif isinstance(value, _CONTAINERS):
            self._container(path, value, depth)
        elif _origin(type(value).__module__) != "machinery":
            self.values[path] = Contents(f"a {type(value).__name__}")
            self._members(path, value, depth)

    def _tensor(self, path: str, tensor: Tensor) -> None:
        is_weight = id(tensor) in self._weights
        if issubclass(type(tensor), torch.nn.Parameter) or (
            is_weight
            and (unfetched(tensor, "dtype").is_floating_point or is_counted(tensor))
        ):
            return  # its values are on the device
        is_plain = is_weight or type(tensor) is Tensor
        is_here = tensor.device.type == "cpu" and tensor.layout == torch.strided
        if is_plain and is_here and not tensor.is_inference():
            version = unfetched(tensor, "_version")
            self.checks.append((unfetched, (tensor, "_version"), version))
            self._constant(path, tensor, tensor.numel() * tensor.element_size())

    def _constant(self, path: str, value: Any, num_bytes: int) -> None:
        if num_bytes > LARGE_BYTES:
            self.is_complete = False
            return
        # A buffer's class is PopTorch's while a program holds it.
        name = "Tensor" if issubclass(type(value), Tensor) else type(value).__name__
        self._sum(path, f"{name} of {value.dtype} {list(value.shape)}", value)

    def _sum(self, path: str, kind: str, value: Any) -> None:
        checksum = _checksum(value)
        self.values[path] = Contents(kind, checksum)
        is_small = isinstance(value, np.ndarray) and value.nbytes <= SMALL_BYTES
        checks = self.checks if is_small else self.thorough_checks
        checks.append((_checksum, (value,), checksum))

    def _module(self, path: str, module: torch.nn.Module, depth: int) -> None:
        self._members(path, module, depth, _TORCHS)
        if "forward" not in vars(module):
            given = vars(module), "forward", _MISSING
            self.checks.append((dict.get, given, _MISSING))
        for name in ("_modules", "_parameters", "_buffers"):
            members = vars(module).get(name)
            if not isinstance(members, dict):  # the module is a compiled script
                continue
            self._whole(members)
            for key in members:
                dtype = _scalar_dtype(members, key) if name == "_buffers" else None
                if dtype is None:
                    self._item(members, key, f"{path}.{key}", depth)
                else:  # its value goes to the device with every call
                    self.checks.append((_scalar_dtype, (members, key), dtype))
                    self.values[f"{path}.{key}"] = Contents(f"0-d buffer of {dtype}")
        for name in _HOOKS:
            hooks = vars(module).get(name, {})
            self._whole(hooks)
            for key in hooks:
                self._item(hooks, key, f"{path}'s hook {key}", depth)

    def _function(self, path: str, function: Any, depth: int) -> None:
        code = function.__code__
        for name in ("__code__", "__defaults__"):
            self.checks.append((getattr, (function, name), getattr(function, name)))
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            where = f"closure variable {name}"
            self._follow(getattr, cell, "cell_contents", where, depth)
        arguments = code.co_varnames[: code.co_argcount]
        default = f"{function.__name__}'s default"
        for name, value in zip(arguments[::-1], (function.__defaults__ or ())[::-1]):
            self._visit(f"{default} {name}", value, depth)
        for name in function.__kwdefaults__ or ():
            self._item(function.__kwdefaults__, name, f"{default} {name}", depth)
        variables = function.__globals__
        if _origin(variables.get("__name__", "__main__")) != "user":
            return
        self.values[path] = code  # other functions of the same code are no change
        read, attributes, is_open = names_read(code)
        self.names |= attributes
        self.is_open |= is_open
        for name in sorted(read):
            if name in variables:
                self._item(variables, name, f"global {name}", depth)
            elif name in sys.modules:
                self._visit(name, sys.modules[name], depth)

    def _class(self, cls: type, depth: int) -> None:
        for base in cls.__mro__:
            if _origin(base.__module__) != "user" or base in self._classes:
                continue
            self._classes.add(base)
            for name, member in list(vars(base).items()):
                if name.startswith("__") and name.endswith("__"):
                    is_code = isinstance(member, types.FunctionType)
                    is_read = is_code and name not in _NOT_IN_FORWARD
                else:
                    is_read = name in self.names or self.is_open
                if is_read:
                    self._item(vars(base), name, f"{base.__name__}.{name}", depth)

    def _container(self, path: str, container: Any, depth: int) -> None:
        kind = f"a {type(container).__name__}"
        is_plain = all(map(_is_plain, container))
        if len(container) > LARGE:
            values: Any = getattr(container, "values", list)()
            self.is_complete &= is_plain and all(map(_is_plain, values))
            self._sum(path, f"{kind} of {len(container)} values", container)
            return
        self._whole(container)
        if isinstance(container, (set, frozenset)):
            self.values[path] = frozenset(container) if is_plain else container
            return
        self.values[path] = Contents(kind)
        if isinstance(container, Mapping):
            for key in list(container):
                self._item(container, key, f"{path}[{key!r}]", depth)
        else:
            for index, element in enumerate(list(container)):
                self._visit(f"{path}[{index}]", element, depth)
        self._members(path, container, depth)

    def _members(
        self, path: str, value: Any, depth: int, torchs: Iterable[str] = ()
    ) -> None:
        """Visit the attributes of an object, and of its class, that code may read."""
        cls = type(value)
        self._class(cls, depth)
        own = getattr(value, "__dict__", {})
        names = {name for name in own if name in self.names}
        if self.is_open or any(map(_reads_any, cls.__mro__)):
            names.update(_public_names(value))
        for name in sorted(names.difference(torchs)):
            self._item(own, name, f"{path}.{name}", depth)
        for base in cls.__mro__:
            if _origin(base.__module__) == "user" and hasattr(value, "__dict__"):
                # An attribute of the object may come to hide one of the class.
                hiding = self.names & vars(base).keys() - own.keys()
                for name in hiding:
                    self.checks.append((dict.get, (own, name, _MISSING), _MISSING))
            for name in getattr(base, "__slots__", ()):
                if name in self.names or self.is_open:
                    self._follow(getattr, value, name, f"{path}.{name}", depth)
        if hasattr(cls, "__getattr__") and not isinstance(value, torch.nn.Module):
            for name in sorted(self.names - own.keys()):
                if not hasattr(cls, name) and _is_kept(value, name):
                    self._follow(getattr, value, name, f"{path}.{name}", depth)

    def is_unmoved(self, *, thoroughly: bool = False) -> bool:
        """Return whether every object is where it was.

        Args:
            thoroughly: Compare the contents of constants and of large containers too.
        """
        checks = [*self.checks, *self.thorough_checks] if thoroughly else self.checks
        for read, given, result in checks:
            now = read(*given)
            if now is not result and not (
                type(now) is type(result) is int and now == result
            ):
                return False
        return True

    def differences(self, now: _Walk) -> Iterator[tuple[str, Any, Any]]:
        """Yield values that differ in a later walk: path, old and new."""
        missing = Contents("missing")
        for path in {**self.values, **now.values}:
            was, new = self.values.get(path, missing), now.values.get(path, missing)
            if was is new:
                continue
            is_same = type(was) is type(new) and isinstance(was, _COMPARED)
            if not is_same or (was != new and (was == was or new == new)):
                yield path, was, new


def _is_kept(owner: Any, name: str) -> bool:
    """Return whether `__getattr__` returns a stored object, and creates no new one."""
    try:
        return getattr(owner, name) is getattr(owner, name)
    except (AttributeError, LookupError, TypeError, ValueError):
        return False


def _walk(roots: Mapping[str, Any]) -> _Walk:
    """Walk until no new names are found: each name may lead to more code."""
    names, is_open = frozenset({"forward", "sums"}), False  # what ipufit and torch call
    while True:
        walk = _Walk(roots, names, is_open=is_open)
        if walk.names == names and walk.is_open == is_open:
            return walk
        names, is_open = frozenset(walk.names), walk.is_open


def _shown(value: Any) -> str:
    """Format a value for a message."""
    if issubclass(type(value), torch.nn.Parameter):  # of PopTorch's class, perhaps
        return "a parameter"
    if isinstance(value, (Tensor, torch.nn.Module)) or len(repr(value)) > 60:
        return f"a {type(value).__name__}"
    return repr(value)


Roots = Mapping[str, Any]
"""Modules and functions that are traced, by their names in messages."""


def roots_of(
    module: torch.nn.Module,
    step: StepFunction | None = None,
    objective: Objective | None = None,
) -> Roots:
    """Collect the modules and functions that a program traces.

    Args:
        module: The user's module.
        step: Function that the program calls in the module's place.
        objective: Losses and metrics of a training program. Streamed metrics aren't
            traced.
    """
    roots: dict[str, Any] = {"module": module}
    method = getattr(step, "method", step)
    if inspect.ismethod(method):  # its code, and the model with the attributes
        roots["model"] = method.__self__
        roots[f"model.{method.__name__}"] = method.__func__
    elif step is not None:
        roots[_name(step)] = step
    if objective is not None:
        roots.update(
            {_name(loss.function): loss.function for _, loss in objective.losses}
        )
        for measure in objective.measures:
            if not isinstance(measure.metric, StreamedMetric):
                roots[f"metric {measure.name}"] = measure.metric
    return roots


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


class BakedInValues:
    """The values that the code of a program could read when it was traced.

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
        self.retake()

    def retake(self) -> None:
        """Record the present values."""
        self._walk = _walk(self._roots)

    @property
    def is_complete(self) -> bool:
        """Whether every value was recorded; else `compile()` has to build anew."""
        return self._walk.is_complete

    def changed(self, *, thoroughly: bool = True) -> tuple[str, Any, Any] | None:
        """Return the first changed value: path, old and new; None if there is none.

        Args:
            thoroughly: Compare large constants and containers too.
        """
        if self._walk.is_unmoved(thoroughly=thoroughly):
            return None
        now = _walk(self._roots)
        change = next(self._walk.differences(now), None)
        if change is None:  # new objects have the same values
            self._walk = now
        return change

    def check(self) -> None:
        """Refuse to go on if a value has changed that is compiled into the program.

        Raises:
            ConfigError: A value has changed; the message has its path.
        """
        change = self.changed(thoroughly=False)
        if change is not None:
            path, *values = change
            old, new = map(_shown, values)
            raise ConfigError(
                f"{path} was {old} when the model was compiled and is "
                f"{f'another {new[2:]}' if old == new else new} "
                "now: the compiled program has the old value baked in. Change it "
                "between fits, pass it as an input, or make it a 0-d buffer "
                "(register_buffer), which may change at any time."
            )


@contextlib.contextmanager
def changes_accepted(others: Iterable[BakedInValues]) -> Iterator[None]:
    """Accept changes of values by a trace, such as a counter's, for other programs.

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
    before = _walk(roots)
    yield
    for path, old, new in before.differences(_walk(roots)):
        if {type(old), type(new)} <= {int, float}:
            _warn(
                f"forward changes {path} (from {old} to {new}) and reads it",
                "the value of that time is baked in, and every batch is computed with "
                "it. Make it a 0-d buffer that a callback changes, or pass it as an "
                "input.",
            )


@contextlib.contextmanager
def random_draws_warned(module: torch.nn.Module) -> Iterator[None]:
    """Warn of random numbers that are drawn on the host while a module is traced.

    A distribution that the module stores has its parameters on the host, and so are its
    samples: PopTorch traces one sample, which is a constant. A distribution that
    `forward` creates is sampled by the device.

    Args:
        module: The user's module, with its submodules.

    Warns:
        BakedInWarning: Code draws from Python's or NumPy's global generator, or samples
            a distribution of the module.
    """
    sampled: dict[str, str] = {}
    noted: list[tuple[dict[str, Any], str]] = []
    for path, part in module.named_modules(prefix="module"):
        for name, value in vars(part).items():
            if isinstance(value, Distribution):
                for method in {"sample", "rsample", "sample_n"} - vars(value).keys():
                    note = partial(_sampled, value, method, f"{path}.{name}", sampled)
                    vars(value)[method] = note
                    noted.append((vars(value), method))
    before = _generators()
    try:
        yield
    finally:
        for attributes, method in noted:
            attributes.pop(method, None)
    drawn = [name for name, state in _generators().items() if state != before[name]]
    if drawn:
        _warn(
            f"forward draws random numbers from {' and '.join(drawn)}",
            "the numbers of that time are baked in, and every batch is computed with "
            "them. Draw with torch, as in torch.rand(1, device=x.device), which a "
            "device does for each micro-batch, or pass the numbers as an input.",
        )
    for path, kind in sampled.items():
        _warn(
            f"forward samples {path}, a {kind} that was made before on the host",
            "that one sample is baked in, and every batch is computed with it. Make "
            f"the {kind} in forward, as in torch.distributions.Uniform(0.0, "
            "1.0).sample(), and the device draws for each micro-batch; or pass the "
            "numbers as an input.",
        )


def _sampled(
    distribution: Distribution,
    method: str,
    path: str,
    sampled: dict[str, str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Record that a method of a distribution is called, and call it."""
    sampled[path] = type(distribution).__name__
    return getattr(type(distribution), method)(distribution, *args, **kwargs)


def _generators() -> dict[str, Any]:
    _, keys, *rest = np.random.get_state()
    numpys = keys.tobytes(), *rest  # type: ignore[attr-defined,unused-ignore]
    return {"Python's random": random.getstate(), "numpy.random": numpys}


def _warn(what: str, why: str) -> None:
    warn(
        f"{what}. It runs once, when the program is compiled: {why}",
        BakedInWarning,
    )
