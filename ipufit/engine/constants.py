# SPDX-License-Identifier: Apache-2.0
"""Python values that are compiled into a program, because its code read them.

A walk begins at the module, the losses and the metrics. It follows submodules, hooks
and functions; for a function the globals, closure variables and defaults that its code
reads; for an object the attributes whose names some code reads. An attribute that no
code reads is left out, so that a callback may count in a module.

The code of installed packages isn't read. All public attributes of their layers and
objects are taken instead. The walk ends after `SIZE` values.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import enum
import functools
import inspect
import sys
import sysconfig
import types
import zlib
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import (
    Any,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Tuple,
)

import numpy as np
import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from ipufit.engine.objective import Objective, StepFunction
from ipufit.engine.trace_checks import warn_of_baked_in
from ipufit.engine.weights import checksum, is_counted, unfetched, weights_of
from ipufit.errors import ConfigError
from ipufit.metrics import StreamedMetric

SIZE = 20_000
SMALL_BYTES = 1 << 16
"""Arrays of numpy up to this size are compared before every call."""
LARGE = 256
"""Containers of more elements are compared as a whole, and between runs only."""
LARGE_BYTES = 1 << 24
"""Tensors and arrays of more bytes are compared by identity only."""


class Contents(NamedTuple):
    """Recorded contents of an object: its kind, and the checksum of a constant."""

    kind: str
    checksum: int = 0

    def __repr__(self) -> str:
        return self.kind


_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(np.generic, np.dtype, enum.Enum, CodeType, Contents),
)
"""Values that are compared by `==`."""


_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
_NO_STEPS = ("PRECALL", "CACHE", "PUSH_NULL", "EXTENDED_ARG")
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_COMPUTED = {"vars", "eval", "exec", "globals", "locals", "__dict__"}
_COMPUTED |= {"attrgetter", "__getattribute__"}
"""Names whose use lets code read attributes by names that aren't in it."""

_CONTAINERS = (list, tuple, collections.deque, Mapping, set, frozenset)
_WRAPPERS = (
    *(types.MethodType, functools.partial, functools.cached_property),
    *(property, staticmethod, classmethod),
)
_WRAPPED = ("__self__", "__func__", "func", "args", "keywords", "fget")
"""Attributes of wrappers that lead to a function and its arguments."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_MEMBERS = ("_modules", "_parameters", "_buffers", *_HOOKS)
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
        "user"; "package" if it is installed, or has objects with settings; "holder" for
        modules of Python whose objects hold values and never read them; "machinery" for
        the rest of Python, torch, numpy, PopTorch and ipufit, whose objects are no
        values.
    """
    root = module_name.partition(".")[0]
    if root in ("types", "argparse", "collections"):
        return "holder"
    of_settings = ("torch.distributions.", "ipufit.metrics.", "ipufit.losses.")
    if (module_name + ".").startswith(of_settings):
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


@functools.lru_cache(maxsize=4096)
def names_read(code: CodeType) -> tuple[frozenset[str], frozenset[str], bool]:
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


# A part of an object is read by one of these, with the object, a key and a default.


def _element(sequence: Any, index: int, default: Any) -> Any:
    return sequence[index] if index < len(sequence) else default


def _scalar(buffers: Any, name: str, default: Any) -> Any:
    """Return the kind of a 0-d buffer, whose value goes to the device in each call."""
    buffer = buffers.get(name)
    is_scalar = issubclass(type(buffer), Tensor) and not unfetched(buffer, "ndim")
    return _scalar_of(unfetched(buffer, "dtype")) if is_scalar else default


@functools.lru_cache(maxsize=None)
def _scalar_of(dtype: torch.dtype) -> Contents:
    return Contents(f"0-d buffer of {dtype}")


def _get_of(mapping: Any) -> Any:
    return dict.get if isinstance(mapping, dict) else type(mapping).get


_Part = Tuple[str, Callable[..., Any], Any, Any]
"""Path of a part in messages, the function that reads it, its owner and its key."""
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
        self, roots: Mapping[str, Any], names: Iterable[str], *, is_open: bool
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
        modules = [one for one in roots.values() if isinstance(one, torch.nn.Module)]
        self._weights = {id(weight) for one in modules for weight in weights_of(one)}
        self._found = collections.deque(roots.items())
        while self._found:
            self._visit(*self._found.popleft())

    def _check(self, read: Callable[..., Any], *given: Any) -> Any:
        """Read a value, which is compared before every call."""
        value = read(*given)
        self.checks.append((read, given, value))
        return value

    def _visit(self, path: str, value: Any) -> None:
        while path in self.values:  # a variable of another function
            path += "'"
        self.values[path] = value
        kind = type(value)
        if _is_plain(value):
            return
        if id(value) in self._visited:
            self.values[path] = Contents(self._visited[id(value)][0])
            return
        self._visited[id(value)] = path, value
        if len(self.values) > SIZE:
            self.is_complete = False
        elif issubclass(kind, Tensor):
            self._tensor(path, value)
        elif issubclass(kind, np.ndarray):
            size, is_small = value.nbytes, value.nbytes <= SMALL_BYTES
            if not value.dtype.hasobject:
                self._constant(path, kind.__name__, value, size, is_small=is_small)
        elif issubclass(kind, (set, frozenset)) or (
            issubclass(kind, _CONTAINERS) and len(value) > LARGE
        ):
            elements = [*value, *getattr(value, "values", list)()]
            self.is_complete &= all(map(_is_plain, elements))
            what = f"a {kind.__name__} of {len(value)} values"
            self._sum(path, what, value, is_small=len(value) <= LARGE)
        else:
            is_itself = (torch.nn.Module, types.FunctionType, types.ModuleType, type)
            is_known = issubclass(kind, (*_CONTAINERS, *_WRAPPERS))
            if not issubclass(kind, is_itself):
                if not is_known and _origin(kind.__module__) == "machinery":
                    return
                self.values[path] = Contents(f"a {kind.__name__}")
            for part, read, owner, key in self._parts(path, value):
                if (id(owner), key) in self._followed:
                    continue
                self._followed.add((id(owner), key))
                with contextlib.suppress(ValueError):  # an empty cell
                    found = self._check(read, owner, key, _MISSING)
                    if found is not _MISSING:
                        self._found.append((part, found))

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
            self._check(unfetched, tensor, "_version")
            size = tensor.numel() * tensor.element_size()
            self._constant(path, "Tensor", tensor, size, is_small=False)

    def _constant(
        self, path: str, kind: str, value: Any, size: int, *, is_small: bool
    ) -> None:
        """Record a tensor's or array's values; a large one counts as the object."""
        if size > LARGE_BYTES:
            self.is_complete = False
        else:
            what = f"{kind} of {value.dtype} {list(value.shape)}"
            self._sum(path, what, value, is_small=is_small)

    def _sum(self, path: str, what: str, value: Any, *, is_small: bool) -> None:
        checksum = _checksum(value)
        self.values[path] = Contents(what, checksum)
        checks = self.checks if is_small else self.thorough_checks
        checks.append((_checksum, (value,), checksum))

    def _parts(self, path: str, value: Any) -> Iterator[_Part]:
        """Yield the parts of an object that code may read."""
        if isinstance(value, types.FunctionType):
            yield from self._parts_of_function(path, value)
        elif isinstance(value, type):
            yield from self._parts_of_class(value)
        elif isinstance(value, types.ModuleType):
            own = vars(value) if _origin(value.__name__) == "user" else {}
            for name in sorted(self.names & own.keys()):
                yield f"{path}.{name}", dict.get, own, name
        elif isinstance(value, _WRAPPERS):
            for name in _WRAPPED:
                if hasattr(value, name):
                    yield f"{path}.{name}", getattr, value, name
        elif isinstance(value, torch.nn.Module):
            yield from self._attributes(path, value)
            read: Any
            for name in _MEMBERS:
                members = vars(value).get(name)
                if not isinstance(members, dict):  # the module is a compiled script
                    continue
                self._check(len, members)
                of_key = "{}'s hook {}" if name in _HOOKS else "{}.{}"
                for key in members:
                    read = dict.get
                    if _scalar(members, key, None) and name == "_buffers":
                        read = _scalar
                    yield of_key.format(path, key), read, members, key
        else:
            if isinstance(value, _CONTAINERS):
                self._check(len, value)
                is_mapping = isinstance(value, Mapping)
                read = _get_of(value) if is_mapping else _element
                for key in list(value) if is_mapping else range(len(value)):
                    yield f"{path}[{key!r}]", read, value, key
            yield from self._attributes(path, value)

    def _parts_of_function(self, path: str, function: Any) -> Iterator[_Part]:
        code = self._check(getattr, function, "__code__")
        defaults = self._check(getattr, function, "__defaults__") or ()
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            yield f"closure variable {name}", getattr, cell, "cell_contents"
        names = code.co_varnames[: code.co_argcount][-len(defaults) :]
        default = f"{function.__name__}'s default"
        for index, (name, _) in enumerate(zip(names, defaults)):
            yield f"{default} {name}", _element, defaults, index
        for name in function.__kwdefaults__ or ():
            yield f"{default} {name}", dict.get, function.__kwdefaults__, name
        variables = function.__globals__
        if _origin(variables.get("__name__", "__main__")) != "user":
            return
        self.values[path] = code  # other functions of the same code are no change
        read, attributes, is_open = names_read(code)
        self.names |= attributes
        self.is_open |= is_open
        for name in sorted(read):
            if name in variables:
                yield f"global {name}", dict.get, variables, name
            elif name in sys.modules:
                yield name, dict.get, sys.modules, name

    def _parts_of_class(self, cls: type) -> Iterator[_Part]:
        for base in _user_bases(cls):
            if base in self._classes:
                continue
            self._classes.add(base)
            members = vars(base)
            for name in list(members):
                if name.startswith("__") and name.endswith("__"):
                    is_code = isinstance(members[name], types.FunctionType)
                    is_read = is_code and name not in _NOT_IN_FORWARD
                else:
                    is_read = name in self.names or self.is_open
                if is_read:
                    yield f"{base.__name__}.{name}", _get_of(members), members, name

    def _attributes(self, path: str, value: Any) -> Iterator[_Part]:
        """Yield the attributes of an object, and of its class, that code may read."""
        cls, own = type(value), getattr(value, "__dict__", {})
        yield from self._parts_of_class(cls)
        is_module = isinstance(value, torch.nn.Module)
        names = self.names & own.keys()
        if self.is_open or any(_may_read_any(base) for base in cls.__mro__):
            is_hidden = hasattr(cls, "__getattr__") and not is_module
            names |= {one for one in own if is_hidden or not one.startswith("_")}
        if is_module:
            names = (names - _TORCHS) | {"forward"}
        for base in _user_bases(cls):
            names |= self.names & vars(base).keys()  # the object's may come to hide it
            for name in getattr(base, "__slots__", ()):
                if name in self.names or self.is_open:
                    yield f"{path}.{name}", getattr, value, name
        for name in sorted(names) if hasattr(value, "__dict__") else ():
            yield f"{path}.{name}", dict.get, own, name

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
            is_compared = isinstance(was, _PLAIN)
            is_same = type(was) is type(new) and is_compared
            if not is_same or (was != new and (was == was or new == new)):
                yield path, was, new


def _user_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if _origin(base.__module__) == "user"]


def _may_read_any(cls: type) -> bool:
    """Return whether a class is a package's: its methods may read any attribute."""
    if cls in (object, torch.nn.Module):
        return False
    is_module = issubclass(cls, torch.nn.Module)
    return _origin(cls.__module__) in ("package", "machinery" if is_module else "")


def _shown(value: Any) -> str:
    """Format a value for a message."""
    if issubclass(type(value), torch.nn.Parameter):  # of PopTorch's class, perhaps
        return "a parameter"
    if isinstance(value, (Tensor, torch.nn.Module)) or len(repr(value)) > 60:
        return f"a {type(value).__name__}"
    return repr(value)


class TrainedParts:
    """The parts of a module that a program trains, and their modes.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> parts = TrainedParts(module)
        >>> _ = module.bias.requires_grad_(False)
        >>> parts == TrainedParts(module)
        False
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._parts = list(module.modules())
        self._weights = list(module.parameters())
        self._before = self._now()

    def _now(self) -> tuple[list[bool], list[bool]]:
        """Return the modes, and whether each parameter requires a gradient.

        Reading a parameter that PopTorch trains fetches all weights, but not here.
        """
        modes = list(map(attrgetter("training"), self._parts))
        if not modes[0]:
            modes = [True] * len(modes)
        with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
            named = repeat("requires_grad")
            return modes, list(map(object.__getattribute__, self._weights, named))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainedParts) and other._before == self._before

    def check(self) -> None:
        """Refuse to go on if a part was frozen or unfrozen.

        Raises:
            ConfigError: A part has changed; the message names it.
        """
        now = self._now()
        if now == self._before:
            return
        names = [name or "module" for name, _ in self._module.named_modules()]
        weights = [name for name, _ in self._module.named_parameters()]
        for what, named, is_of, was in (
            ("train mode", names, now[0], self._before[0]),
            ("trained", weights, now[1], self._before[1]),
        ):
            for name, new, old in zip(named, is_of, was):
                if new != old:
                    raise ConfigError(
                        f"{name} was {'' if old else 'not '}{what} when the model was "
                        f"compiled and is {'' if new else 'not '}now: the program "
                        "goes on as it was compiled. Freeze and unfreeze between fits."
                    )


class BakedInValues:
    """The values that the code of a program could read when it was traced.

    Args:
        module: The user's module.
        step: Function that the program calls in the module's place.
        objective: Losses and metrics of a training program. Streamed metrics aren't
            traced.

    Example:
        >>> module = torch.nn.Dropout(0.5)
        >>> values = BakedInValues(module)
        >>> module.p = 0.25
        >>> values.check()
        Traceback (most recent call last):
        ipufit.errors.ConfigError: module.p was 0.5 when the model was compiled ...
    """

    def __init__(
        self,
        module: torch.nn.Module,
        step: StepFunction | None = None,
        objective: Objective | None = None,
    ) -> None:
        self._roots: dict[str, Any] = {"module": module}
        method = getattr(step, "method", step)
        if inspect.ismethod(method):  # its code, and the model with the attributes
            self._roots["model"] = method.__self__
            self._roots[f"model.{method.__name__}"] = method.__func__
        elif step is not None:
            self._roots[_name(step)] = step
        if objective is not None:
            for _, loss in objective.losses:
                self._roots[_name(loss.function)] = loss.function
            for measure in objective.measures:
                if not isinstance(measure.metric, StreamedMetric):
                    self._roots[f"metric {measure.name}"] = measure.metric
        self.retake()

    def retake(self) -> None:
        """Record the present values."""
        self._walk = self._walked()

    def _walked(self) -> _Walk:
        """Walk until no new names are found: each name may lead to more code."""
        names, is_open = {"forward", "sums"}, False  # what ipufit and torch call
        while True:
            walk = _Walk(self._roots, names, is_open=is_open)
            if walk.names == names and walk.is_open == is_open:
                return walk
            names, is_open = walk.names, walk.is_open

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
        now = self._walked()
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
    def traced(self, others: Iterable[BakedInValues] = ()) -> Iterator[None]:
        """Record the values anew after a trace inside the context.

        Args:
            others: Values of other programs, which accept what the trace changes, such
                as a counter.

        Warns:
            BakedInWarning: `forward` reads a number and changes it.
        """
        current = [one for one in others if one.changed() is None]
        try:
            yield
        finally:
            before = self._walk
            for one in (self, *current):
                one.retake()
        for path, old, new in before.differences(self._walk):
            if {type(old), type(new)} <= {int, float}:
                warn_of_baked_in(
                    f"forward changes {path} (from {old} to {new}) and reads it",
                    "the value of that time is baked in, and every batch is computed "
                    "with it. Make it a 0-d buffer that a callback changes, or pass it "
                    "as an input.",
                )


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
