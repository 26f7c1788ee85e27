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
import importlib.util
import inspect
import operator
import sys
import sysconfig
import types
import zlib
from dataclasses import is_dataclass
from functools import partial
from types import CodeType
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Tuple

import numpy as np
import torch
from torch import Tensor

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


class Kind(str):
    """Text about a value that isn't plain; equal values have equal texts.

    What follows `#` is the object's identity, or the checksum of a constant.
    """

    def __repr__(self) -> str:
        return self.partition(" #")[0]


_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(np.generic, np.dtype, enum.Enum, CodeType),
)
"""Values that are compared by `==`."""
_CONTAINERS = (list, tuple, collections.deque, Mapping, set, frozenset)
_WRAPPERS = (
    *(types.FunctionType, types.MethodType, functools.partial),
    *(functools.cached_property, property, staticmethod, classmethod),
)
_WRAPPED = (
    *("__self__", "__func__", "func", "args", "keywords", "fget"),
    *("__code__", "__defaults__", "__kwdefaults__"),
)
"""Attributes of functions and their wrappers that lead to code and its arguments."""
_THEMSELVES = (torch.nn.Module, types.FunctionType, type, Tensor, np.ndarray)
"""Objects that equal only themselves."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_TORCHS = {"training", *vars(torch.nn.Module())}
"""Attributes that torch itself keeps in a module."""
_NOT_IN_FORWARD = {
    *("init", "new", "del", "repr", "str", "format", "dir", "copy", "deepcopy"),
    *("set_name", "reduce", "reduce_ex", "getstate", "setstate"),
}
"""Special methods of a class that `forward` doesn't call."""
_COMPARISONS = {f"__{name}__" for name in ("eq", "ge", "gt", "hash", "le", "lt")}
"""Methods of a dataclass that read all of its fields."""
_MISSING: Any = Kind("missing")


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
    if root == "__main__":  # also of code that an installed program runs
        return "user"
    if root in ("types", "argparse", "collections"):
        return "holder"
    of_settings = ("torch.distributions.", "ipufit.metrics.", "ipufit.losses.")
    if f"{module_name}.".startswith(of_settings):
        return "package"
    module = sys.modules.get(root)
    files = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    file = next((one for one in files if one), "")
    is_builtin = not file and root in sys.builtin_module_names
    if is_builtin or root in ("torch", "ipufit", "poptorch", "numpy"):
        return "machinery"
    if "site-packages" in file or "dist-packages" in file:
        return "package"
    return "machinery" if file.startswith(sysconfig.get_path("stdlib")) else "user"


_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_HAS_METHOD_BIT = sys.version_info >= (3, 12)
"""Whether the lowest bit of an attribute's step says that it is called."""
_NO_STEPS = ("PRECALL", "CACHE", "PUSH_NULL", "EXTENDED_ARG")
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_COMPUTED = {"vars", "eval", "exec", "globals", "locals", "__dict__"}
_COMPUTED |= {"attrgetter", "__getattribute__"}
"""Names whose use lets code read attributes by names that aren't in it."""


class NamesRead(NamedTuple):
    """The names that the code of a function reads, and of functions inside it.

    A name that is only counted up (`self.calls += 1`), put into (`self.seen["x"] = x`),
    or read after it was set (`self.hidden = ...`) isn't included: no result depends on
    its old value.

    Attributes:
        variables: Names of globals.
        modules: Imported modules; a relative one begins with dots.
        attributes: Names of attributes, of whatever object.
        methods: Names of attributes that are called at once.
        is_open: Whether the code may read attributes by names that it computes.
    """

    variables: set[str]
    modules: set[str]
    attributes: set[str]
    methods: set[str]
    is_open: bool


@functools.lru_cache(maxsize=4096)
def names_read(code: CodeType) -> NamesRead:
    """Return the names that the code of a function reads, by kind.

    Example:
        >>> names_read((lambda x: x.mean() * SCALE).__code__).variables
        {'SCALE'}
    """
    names: list[set[str]] = [set(), set(), set(), set()]
    variables, modules, attributes, methods = names
    was_set: set[str] = set()
    of_class: set[str] = set()
    is_open = False
    is_straight = True
    # From Python 3.11 on, no step begins what an error may leave.
    tries = getattr(dis.Bytecode(code), "exception_entries", ())
    first_try = min((entry.start for entry in tries), default=sys.maxsize)
    steps = [i for i in dis.get_instructions(code) if i.opname not in _NO_STEPS]
    kinds = [step.opname for step in steps]
    for at, (step, kind, before) in enumerate(zip(steps, kinds, ["", *kinds])):
        is_straight &= step.opcode not in _JUMPS and step.offset < first_try
        if kind in _VARIABLES:
            stored = steps[at + 3 : at + 4]  # after an operand and an operator
            is_counted_up = [(one.opname, one.argval) for one in stored] == [
                ("STORE_GLOBAL", step.argval)
            ]
            if not (is_counted_up or step.argval in of_class):
                variables.add(step.argval)
            if step.argval in ("getattr", "hasattr"):
                name = _constant_name(steps[at + 1 :])
                attributes.add(name)
                is_open |= not name
        elif kind == "IMPORT_NAME":
            level = steps[at - 2].argval
            modules.add("." * (level or 0) + step.argval)
        elif kind == "STORE_NAME" and is_straight:
            of_class.add(step.argval)
        elif kind == "STORE_ATTR" and is_straight and "LOAD_" in before:
            was_set.add(step.argval)
        elif kind in _ATTRIBUTES:
            is_counted_up = before in ("DUP_TOP", "COPY")
            is_filled = "STORE_SUBSCR" in kinds[at + 2 : at + 3]
            is_called = kind == "LOAD_METHOD" or (
                kind == "LOAD_ATTR" and _HAS_METHOD_BIT and (step.arg or 0) & 1 == 1
            )
            if not (is_counted_up or is_filled or step.argval in was_set):
                (methods if is_called else attributes).add(step.argval)
    for inner in (one for one in code.co_consts if isinstance(one, CodeType)):
        read = names_read(inner)
        for outer_names, inner_names in zip(names, read[:4]):
            outer_names |= inner_names
        is_open |= read.is_open
    is_open |= not _COMPUTED.isdisjoint({*variables, *attributes, *methods})
    return NamesRead(variables, modules, attributes, methods, is_open)


def _constant_name(following: list[dis.Instruction]) -> str:
    """Return the name in `getattr(x, "name")`, with a plain or no default; else ""."""
    calls = (i for i, one in enumerate(following) if one.opname.startswith("CALL"))
    call = next(calls, 0)
    count = following[call].arg or 0
    given = following[max(call + 1 - count, 0) : call] if count in (2, 3) else []
    if not given or not all(one.opname.startswith("LOAD_") for one in given):
        return ""
    return str(given[0].argval) if given[0].opname == "LOAD_CONST" else ""


def _checksum(value: Any) -> int:
    """Return a checksum of a tensor, an array, or the elements of a container."""
    if isinstance(value, Tensor):
        return checksum(value)
    if isinstance(value, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    elements = [*value, *getattr(value, "values", list)()]
    texts = [
        repr(one) if issubclass(type(one), _PLAIN) else str(id(one)) for one in elements
    ]
    return zlib.crc32("\n".join(texts).encode())


def _buffer(buffers: Mapping[str, Any], name: str) -> Any:
    """Return a buffer; of a 0-d one, whose value goes to the device, only the kind."""
    buffer: Any = buffers.get(name)
    if not issubclass(type(buffer), Tensor) or unfetched(buffer, "ndim"):
        return buffer
    return _kind(f"0-d buffer of {unfetched(buffer, 'dtype')}")


_kind = functools.lru_cache(maxsize=None)(Kind)

_Check = Tuple[Callable[..., Any], Tuple[Any, ...], Any]
"""A function, its arguments, and the result that it gave."""


class _Walk:
    """A walk through code, for attributes of some names.

    Attributes:
        names: Attributes that were given, and those found on the way.
        methods: Attributes that are called, likewise.
        is_open: Whether code may read attributes of other names too.
        is_complete: Whether the walk met no bound.
        values: Values by path: plain ones, and the `Kind` of others.
        checks: Functions with arguments and results, to compare before every call.
        thorough_checks: Checks of large constants, to compare between runs.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        names: Iterable[str],
        methods: Iterable[str],
        *,
        is_open: bool,
    ) -> None:
        self.names, self.methods = set(names), set(methods)
        self.is_open = is_open
        self.is_complete = True
        self.values: dict[str, Any] = {}
        self.checks: list[_Check] = []
        self.thorough_checks: list[_Check] = []
        self._visited: dict[int, tuple[str, Any]] = {}  # keeps objects, for their ids
        self._followed: set[tuple[int, Any]] = set()
        modules = [one for one in roots.values() if isinstance(one, torch.nn.Module)]
        self._weights = {id(weight) for one in modules for weight in weights_of(one)}
        self._found = collections.deque(roots.items())
        while self._found:
            self._visit(*self._found.popleft())

    def _visit(self, path: str, value: Any) -> None:
        while path in self.values:  # a variable of another function
            path += "'"
        kind = type(value)
        if issubclass(kind, _PLAIN):  # isinstance() would touch a wrapped weight
            self.values[path] = value
            return
        home = value.__name__ if kind is types.ModuleType else kind.__module__
        is_known = issubclass(kind, (*_THEMSELVES, *_CONTAINERS, *_WRAPPERS))
        is_followed = is_known or _origin(home) != "machinery"
        name = "Parameter" if issubclass(kind, torch.nn.Parameter) else kind.__name__
        is_itself = not is_followed or issubclass(kind, _THEMSELVES)
        text = f"a {name} #{id(value) if is_itself else ''}"
        is_new = id(value) not in self._visited
        first_path, _ = self._visited.setdefault(id(value), (path, value))
        self.values[path] = Kind(text if is_new else first_path)
        if len(self.values) > SIZE:
            self.is_complete = False
        elif not is_followed or not is_new:
            pass
        elif issubclass(kind, Tensor):
            self._tensor(path, value)
        elif issubclass(kind, np.ndarray):
            if not value.dtype.hasobject:
                is_small = value.nbytes <= SMALL_BYTES
                what = f"{kind.__name__} of {value.dtype} {list(value.shape)}"
                self._constant(path, what, value, value.nbytes, is_small=is_small)
        elif issubclass(kind, (set, frozenset)) or (
            issubclass(kind, _CONTAINERS) and len(value) > LARGE
        ):
            elements = [*value, *getattr(value, "values", list)()]
            self.is_complete &= all(issubclass(type(one), _PLAIN) for one in elements)
            what = f"a {kind.__name__} of {len(value)} values"
            self._constant(path, what, value, is_small=len(value) <= LARGE)
        elif issubclass(kind, _WRAPPERS):
            for name in filter(partial(hasattr, value), _WRAPPED):
                self._follow(f"{path}.{name}", getattr, value, name)
            if kind is types.FunctionType:
                self._function(path, value)
        else:
            self._attributes(path, value)
            if isinstance(value, _CONTAINERS):
                self._check(len, value)
                # A `defaultdict` would make what `getitem` misses.
                read = dict.get if isinstance(value, dict) else operator.getitem
                is_mapping = isinstance(value, Mapping)
                for key in list(value) if is_mapping else range(len(value)):
                    self._follow(f"{path}[{key!r}]", read, value, key)

    def _check(self, read: Callable[..., Any], *given: Any) -> Any:
        """Read a value, which is compared before every call."""
        value = read(*given)
        self.checks.append((read, given, value))
        return value

    def _follow(self, path: str, read: Any, owner: Any, key: Any) -> None:
        """Visit a part of an object, once; it may be missing."""
        if (id(owner), key) not in self._followed:
            self._followed.add((id(owner), key))
            default = [_MISSING] if read in (dict.get, getattr) else []
            with contextlib.suppress(ValueError):  # an empty cell
                found = self._check(read, owner, key, *default)
                if found is not _MISSING:
                    self._found.append((path, found))

    def _tensor(self, path: str, tensor: Tensor) -> None:
        """Record the values of a tensor that is no weight of the device."""
        is_weight = id(tensor) in self._weights
        if issubclass(type(tensor), torch.nn.Parameter) or (
            is_weight
            and (unfetched(tensor, "dtype").is_floating_point or is_counted(tensor))
        ):
            return
        is_plain = is_weight or type(tensor) is Tensor
        is_here = tensor.device.type == "cpu" and tensor.layout == torch.strided
        if is_plain and is_here and not tensor.is_inference():
            self._check(unfetched, tensor, "_version")
            what = f"a Tensor of {tensor.dtype} {list(tensor.shape)}"
            size = tensor.numel() * tensor.element_size()
            self._constant(path, what, tensor, size, is_small=False)

    def _constant(
        self, path: str, what: str, value: Any, size: int = 0, *, is_small: bool
    ) -> None:
        """Record a constant by its checksum; a large one counts as the object."""
        if size > LARGE_BYTES:
            self.is_complete = False
            return
        checksum = _checksum(value)
        self.values[path] = Kind(f"{what} #{checksum}")
        checks = self.checks if is_small else self.thorough_checks
        checks.append((_checksum, (value,), checksum))

    def _function(self, path: str, function: Any) -> None:
        """Visit what the code of a function reads beside attributes."""
        code, variables = function.__code__, function.__globals__
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            self._follow(f"closure variable {name}", getattr, cell, "cell_contents")
        if _origin(variables.get("__name__", "__main__")) != "user":
            return
        self.values[path] = Kind("a function")  # another of the same code is no change
        read = names_read(code)
        self.names |= read.attributes
        self.methods |= read.methods
        self.is_open |= read.is_open
        for name in sorted(read.variables & variables.keys()):
            self._follow(f"global {name}", dict.get, variables, name)
        package = variables.get("__package__")
        for name in sorted(read.modules):
            with contextlib.suppress(ImportError, ValueError):  # it can't be imported
                name = importlib.util.resolve_name(name, package)
            if name in sys.modules:
                self._follow(name, dict.get, sys.modules, name)

    def _attributes(self, path: str, value: Any) -> None:
        """Visit the attributes of an object, and of its class, that code may read."""
        is_layer = isinstance(value, torch.nn.Module)
        is_class = isinstance(value, type)
        own = {} if is_class else getattr(value, "__dict__", {})
        read, is_open = self.names | self.methods, self.is_open
        names = read & own.keys()
        for base in (value if is_class else type(value)).__mro__:
            origin, members = _origin(base.__module__), vars(base)
            if origin == "user":
                names |= read & members.keys()  # the object's may come to hide it
                for name in list(members):
                    is_special = name.startswith("__") and name.endswith("__")
                    if (
                        hasattr(members[name], "__code__")
                        and name[2:-2] not in _NOT_IN_FORWARD
                        and not (is_dataclass(base) and name in _COMPARISONS)
                        if is_special
                        else name in read or self.is_open
                    ):
                        of_class = f"{base.__name__}.{name}"
                        self._follow(of_class, operator.getitem, members, name)
                        if name in members.get("__slots__", ()):
                            self._follow(f"{path}.{name}", getattr, value, name)
            elif base not in (object, torch.nn.Module):  # its code may read any
                is_open |= origin == "package" or (is_layer and origin == "machinery")
        # What isn't callable has only the name of another object's method.
        names = {n for n in names if n in self.names or callable(own.get(n, callable))}
        if is_open and type(value) is not types.ModuleType:
            is_hidden = hasattr(type(value), "__getattr__") and not is_layer
            names |= {one for one in own if is_hidden or not one.startswith("_")}
        if is_layer:
            names = (names - _TORCHS) | {"forward"}
            for part in ("_modules", "_parameters", "_buffers", *_HOOKS):
                members = own.get(part)
                if not isinstance(members, dict):  # a compiled script
                    continue
                self._check(len, members)
                get = _buffer if part == "_buffers" else operator.getitem
                for key in members:
                    name = f"{path}'s hook {key}" if part in _HOOKS else f"{path}.{key}"
                    self._follow(name, get, members, key)
        for name in sorted(names) if hasattr(value, "__dict__") else ():
            self._follow(f"{path}.{name}", dict.get, own, name)

    def is_unmoved(self, *, thoroughly: bool = False) -> bool:
        """Return whether every object is where it was.

        Args:
            thoroughly: Compare the contents of constants and of large containers too.
        """
        checks = [*self.checks, *self.thorough_checks] if thoroughly else self.checks
        try:
            for read, given, result in checks:
                now = read(*given)
                if now is not result and not (
                    type(now) is type(result) is int and now == result
                ):
                    return False
        except (LookupError, AttributeError, ValueError):  # it isn't there any more
            return False
        return True

    def differences(self, now: _Walk) -> Iterator[tuple[str, Any, Any]]:
        """Yield values that differ in a later walk: path, old and new."""
        for path in {**self.values, **now.values}:
            was, new = (w.values.get(path, _MISSING) for w in (self, now))
            is_nan = was != was and new != new
            if type(was) is not type(new) or (was != new and not is_nan):
                yield path, was, new


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
            for output_metric in objective.metrics:
                if not isinstance(output_metric.metric, StreamedMetric):
                    self._roots[f"metric {output_metric.name}"] = output_metric.metric
        self.retake()

    def retake(self) -> None:
        """Record the present values."""
        self._walk = self._walked()

    def _walked(self) -> _Walk:
        """Walk until no new names are found: each name may lead to more code."""
        names: set[str] = set()
        methods, is_open = {"forward", "sums"}, False  # what ipufit and torch call
        while True:
            walk = _Walk(self._roots, names, methods, is_open=is_open)
            known = names, methods, is_open
            names, methods, is_open = walk.names, walk.methods, walk.is_open
            if known == (names, methods, is_open):
                return walk

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
            raise ConfigError(
                f"{describe_change(change, ' when the model was compiled')}: the "
                "compiled program has the old value baked in. Change it between fits, "
                "pass it as an input, or make it a 0-d buffer (register_buffer), which "
                "may change at any time."
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


def describe_change(change: tuple[str, Any, Any], when: str = "") -> str:
    """Describe a changed value: path, old and new.

    Example:
        >>> describe_change(("global scale", 1, 2))
        'global scale was 1 and is 2 now'
    """
    path, *values = change
    old, new = (
        repr(one) if len(repr(one)) <= 60 else f"a {type(one).__name__}"
        for one in values
    )
    new = f"another {new[2:]}" if old == new else new
    return f"{path} was {old}{when} and is {new} now"


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
