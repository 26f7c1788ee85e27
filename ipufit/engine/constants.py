# SPDX-License-Identifier: Apache-2.0
"""What is compiled into a program as a constant, and what a change of it means.

The constants are Python values that the program's code read (`BakedInValues`), and
which parts of the module are frozen or in eval mode (`TrainedParts`). If one of them
changes between two runs, the next run gets another program (`Executors._find`). If one
changes within a run, the next call is refused (`Program.check`). Losses, metrics and
constant values of the optimizer are settings, in `TrainingSpec.key`. 0-d buffers are
inputs of a program (`weights.py`). `trace_checks.py` warns of random numbers that the
trace itself draws.

`ReadableValues` collects the Python values. It begins at the module, the losses and the
metrics, and follows submodules, hooks, containers and functions. Of a function it
follows the globals, closure variables and defaults; of an object the attributes that
some code names (`co_names`). A comparison only checks whether each object is still at
its place. If an object was replaced, the program is called on the host again. The
change counts if this call differs from the first call.

The code of installed packages isn't read. All public attributes of their layers and
objects are compared instead. The collection stops after `SIZE` objects.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import enum
import functools
import inspect
import operator
import sys
import sysconfig
import types
import zlib
from itertools import repeat
from operator import attrgetter
from types import CodeType
from typing import Any, Callable, Iterable, Iterator, Mapping, Tuple

import numpy as np
import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from ipufit._modules import modules_of, parameters_of, path_of, weights_of
from ipufit.engine.objective import Objective, StepFunction
from ipufit.engine.trace_checks import warn_of_baked_in
from ipufit.engine.weights import checksum, is_counted, unfetched
from ipufit.errors import ConfigError
from ipufit.metrics import StreamedMetric

SIZE = 20_000
SMALL_BYTES = 1 << 16
"""Arrays of numpy up to this size are compared before every call."""
LARGE = 256
"""Containers of more elements are compared between runs only, and not followed."""

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(np.generic, np.dtype, enum.Enum, CodeType),
)
"""Values that are compared by `==`."""
_CONTAINERS = (dict, list, tuple, collections.deque, set, frozenset)
_WRAPPERS = (
    *(types.MethodType, functools.partial, functools.cached_property),
    *(property, staticmethod, classmethod),
)
_WRAPPED = ("__self__", "__func__", "func", "args", "keywords", "fget")
"""Attributes of wrappers that lead to a function and its arguments."""
_USED = ("_modules", "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks")
"""Dicts of a module with what its `forward` uses."""
_TORCHS = {"training", *vars(torch.nn.Module())}
"""Attributes that torch itself keeps in a module."""
_NOT_IN_FORWARD = {"__init__", "__new__", "__del__", "__repr__", "__str__"}
"""Special methods of a class that `forward` doesn't call."""
_COMPUTED = {"getattr", "vars", "eval", "exec", "globals", "locals", "__dict__"}
_COMPUTED |= {"attrgetter", "__getattribute__"}
"""Names whose use lets code read attributes by names that aren't in it."""
_ALWAYS_CALLED = {"forward", "sums"}
"""Names of what torch and ipufit call."""
_MISSING: Any = types.SimpleNamespace()
_STEPS = 100_003
"""Steps added to a counter, to see whether the program depends on the counter.

It is a prime number, so that `counter % n` changes, too.
"""


@functools.lru_cache(maxsize=None)
def _origin(module_name: str) -> str:
    """Classify a Python module by its author.

    Returns:
        "user"; "package" for an installed module, or one whose objects have settings;
        "machinery" for Python, torch, numpy, PopTorch and ipufit, whose objects are not
        compared.
    """
    root = module_name.partition(".")[0]
    if root == "__main__":  # also of code that an installed program runs
        return "user"
    of_settings = ("torch.distributions.", "ipufit.metrics.", "ipufit.losses.")
    is_holder = root in ("types", "argparse", "collections")
    if is_holder or f"{module_name}.".startswith(of_settings):
        return "package"
    module = sys.modules.get(root)
    files = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    file = next(filter(None, files), "")
    is_builtin = not file and root in sys.builtin_module_names
    if is_builtin or root in ("torch", "ipufit", "poptorch", "numpy"):
        return "machinery"
    if "site-packages" in file or "dist-packages" in file:
        return "package"
    return "machinery" if file.startswith(sysconfig.get_path("stdlib")) else "user"


@functools.lru_cache(maxsize=4096)
def _code_names(code: CodeType) -> frozenset[str]:
    """Return the names in a function's code, and the strings that may be names."""
    texts = (text for text in code.co_consts if isinstance(text, str))
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return frozenset({*code.co_names, *texts}.union(*map(_code_names, inner)))


@functools.lru_cache(maxsize=4096)
def _code_globals(code: CodeType) -> frozenset[str]:
    """Return the global variables that a function reads; `self.loss` isn't `loss`."""
    steps = dis.get_instructions(code)
    read = (s.argval for s in steps if s.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(read).union(*map(_code_globals, inner))


def _contents(value: Any) -> Any:
    """Return a value to compare: equal for equal constants and equal containers."""
    if isinstance(value, _CONTAINERS):
        return [*map(id, value), *map(id, getattr(value, "values", list)())]
    return checksum(value) if isinstance(value, Tensor) else zlib.crc32(value.tobytes())


def _version(tensor: Tensor) -> int:
    return int(unfetched(tensor, "_version"))


class _Words(str):
    def __repr__(self) -> str:
        return str(self)


_in_words = functools.lru_cache(maxsize=None)(_Words)


def _buffer(buffers: Mapping[str, Any], name: str) -> Any:
    """Return a buffer, or only the type of a 0-d buffer, whose value may change."""
    buffer: Any = buffers.get(name)
    if not issubclass(type(buffer), Tensor) or unfetched(buffer, "ndim"):
        return buffer
    return _in_words(f"0-d buffer of {unfetched(buffer, 'dtype')}")


_READS_OF_CONTENTS = (_contents, _version, len)
"""What is read of an object to see whether the object itself has changed."""


_NOT_THERE = (LookupError, AttributeError, ValueError)  # ValueError: an empty cell


def _are_equal(value: Any, other: Any, read: Callable[..., Any]) -> bool:
    if type(value) is not type(other):
        return False
    if not (issubclass(type(value), _PLAIN) or read in _READS_OF_CONTENTS):
        return False
    return bool(value == other or (value != value and other != other))  # NaN


_Place = Tuple[str, Callable[..., Any], Tuple[Any, ...], Any]
"""A path such as `module.scale`, how to read what is there, and the value before."""


class ReadableValues:
    """The values that code can read, and the paths at which it reads them.

    Args:
        roots: Functions and objects to begin at, by name.

    Attributes:
        is_complete: Whether all values are compared.
        names: The names in the code.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.is_complete = True
        self.names: set[str] = set()
        self._places: list[_Place] = []
        self._large_places: list[_Place] = []  # compared between runs only
        self._visited: dict[int, tuple[str, Any]] = {}  # keeps objects, for their ids
        self._followed: set[tuple[int, Any]] = set()
        # Attributes that no code has named so far.
        self._waiting: dict[str, list[tuple[Any, ...]]] = collections.defaultdict(list)
        modules = [root for root in roots.values() if isinstance(root, torch.nn.Module)]
        self._weights = {id(weight) for part in modules for weight in weights_of(part)}
        self._queue = collections.deque(roots.items())
        self._add_names(_ALWAYS_CALLED)
        while self._queue:
            self._visit(*self._queue.popleft())

    def changes(self, *, thoroughly: bool) -> Iterator[tuple[_Place, Any]]:
        """Yield each place whose value has changed, with the new value.

        Args:
            thoroughly: Compare large containers and constants too.
        """
        places = self._places + self._large_places if thoroughly else self._places
        for path, read, arguments, before in places:
            try:
                now = read(*arguments)
            except _NOT_THERE:
                now = _MISSING
            if now is not before and not _are_equal(now, before, read):
                yield (path, read, arguments, before), now

    def described(self, place: _Place, now: Any, when: str) -> str:
        """Describe a changed value: its path, old and new value."""
        path, read, arguments, before = place
        if read in _READS_OF_CONTENTS:
            before = now = arguments[0]
        old, new = (self._described(path, value) for value in (before, now))
        new = f"another {new[2:]}" if new == old else new
        return f"{path} was {old}{when} and is {new} now"

    def _described(self, path: str, value: Any) -> str:
        if value is _MISSING:
            return "missing"
        elements = value if type(value) is tuple else (value,)
        is_plain = all(issubclass(type(element), _PLAIN) for element in elements)
        if is_plain and len(repr(value)) <= 60:
            return repr(value)
        known_path, _ = self._visited.get(id(value), (path, None))
        return f"a {type(value).__name__}" if known_path == path else known_path

    def _follow(
        self, path: str, read: Callable[..., Any], owner: Any, *key: Any
    ) -> None:
        """Record the value at a place, and visit the value."""
        if (id(owner), key[:1]) in self._followed:
            return
        self._followed.add((id(owner), key[:1]))
        value = _MISSING
        with contextlib.suppress(*_NOT_THERE):
            value = read(owner, *key)
        self._places.append((path, read, (owner, *key), value))
        if read not in _READS_OF_CONTENTS:
            self._queue.append((path, value))

    def _is_named(self, name: str) -> bool:
        """Return whether code may read an attribute of this name."""
        is_computed = not _COMPUTED.isdisjoint(self.names)
        return name in self.names or (is_computed and not name.startswith("_"))

    def _offer(self, name: str, *place: Any) -> None:
        """Follow an attribute as soon as some code names it."""
        if self._is_named(name):
            self._follow(*place)
        else:
            self._waiting[name].append(place)

    def _add_names(self, names: Iterable[str]) -> None:
        self.names.update(names)
        for name in sorted(filter(self._is_named, self._waiting)):
            for place in self._waiting.pop(name):
                self._follow(*place)

    def _visit(self, path: str, value: Any) -> None:
        kind = type(value)
        if issubclass(kind, _PLAIN) or value is _MISSING or id(value) in self._visited:
            return  # isinstance() would touch a wrapped weight
        if len(self._visited) >= SIZE:
            self.is_complete = False
            return
        self._visited[id(value)] = path, value
        if issubclass(kind, Tensor):
            self._visit_tensor(path, value)
        elif issubclass(kind, np.ndarray):
            self._compare(path, value, is_large=value.nbytes > SMALL_BYTES)
        elif issubclass(kind, types.FunctionType):
            self._visit_function(path, value)
        elif issubclass(kind, type):
            self._visit_class(value)
        elif issubclass(kind, _WRAPPERS):
            parts = [name for name in _WRAPPED if hasattr(value, name)]
            self._queue.extend((f"{path}.{n}", getattr(value, n)) for n in parts)
        else:
            if issubclass(kind, _CONTAINERS):
                self._visit_container(path, value)
            is_layer = issubclass(kind, torch.nn.Module)
            if is_layer or _origin(kind.__module__) != "machinery":
                self._visit_object(path, value)

    def _visit_tensor(self, path: str, tensor: Tensor) -> None:
        """Record a tensor, unless it is a weight of the device."""
        is_weight = id(tensor) in self._weights
        if issubclass(type(tensor), torch.nn.Parameter) or (
            is_weight
            and (unfetched(tensor, "dtype").is_floating_point or is_counted(tensor))
        ):
            return
        is_plain = is_weight or type(tensor) is Tensor
        is_here = tensor.device.type == "cpu" and tensor.layout == torch.strided
        if is_plain and is_here and not tensor.is_inference():
            self._follow(path, _version, tensor)
            self._compare(path, tensor, is_large=True)

    def _compare(self, path: str, value: Any, *, is_large: bool) -> None:
        """Record the contents of an object that isn't followed."""
        place = path, _contents, (value,), _contents(value)
        (self._large_places if is_large else self._places).append(place)

    def _visit_container(self, path: str, value: Any) -> None:
        is_large = len(value) > LARGE
        if is_large or issubclass(type(value), (set, frozenset)):
            elements = [*value, *getattr(value, "values", list)()]
            self.is_complete &= all(issubclass(type(v), _PLAIN) for v in elements)
            self._compare(path, value, is_large=is_large)
            return
        if isinstance(value, tuple):  # it can't change
            self._queue.extend((f"{path}[{i}]", part) for i, part in enumerate(value))
            return
        self._follow(path, len, value)
        is_dict = isinstance(value, dict)
        # A `defaultdict` would make what `getitem` misses.
        read, *default = [dict.get, _MISSING] if is_dict else [operator.getitem]
        for key in list(value) if is_dict else range(len(value)):
            self._follow(f"{path}[{key!r}]", read, value, key, *default)

    def _visit_function(self, path: str, function: Any) -> None:
        """Visit the globals, closure variables and defaults of a function."""
        code, variables = function.__code__, function.__globals__
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            self._follow(f"closure variable {name}", getattr, cell, "cell_contents")
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._follow(f"{path}.{name}", getattr, function, name)
        if _origin(variables.get("__name__", "__main__")) != "user":
            return
        names = _code_names(code)
        self._add_names(names)
        self._visit_variables("global ", variables, _code_globals(code), names)
        package, imported = variables.get("__package__") or "", set(names)
        while package:
            imported.update(f"{package}.{name}" for name in names)
            package = package.rpartition(".")[0]
        for name in sorted(sys.modules.keys() & imported):  # by imports inside of it
            self._visit_module(sys.modules[name], names)

    def _visit_module(self, module: Any, names: frozenset[str]) -> None:
        is_module = isinstance(module, types.ModuleType)
        if is_module and (id(module), names) not in self._followed:
            self._followed.add((id(module), names))
            if _origin(module.__name__) == "user":
                self._visit_variables(f"{module.__name__}.", vars(module), names, names)

    def _visit_variables(
        self,
        prefix: str,
        variables: dict[str, Any],
        names: frozenset[str],
        attributes: frozenset[str],
    ) -> None:
        """Visit variables of a Python module, and attributes of modules among them."""
        for name in sorted(variables.keys() & names):
            self._visit_module(variables[name], attributes)
            if not isinstance(variables[name], types.ModuleType):
                self._follow(f"{prefix}{name}", dict.get, variables, name, _MISSING)

    def _visit_class(self, value: type) -> None:
        """Visit the members of a user's class, and of its bases, that code may read."""
        for base in value.__mro__:
            if _origin(base.__module__) != "user":
                continue
            members = vars(base)
            for name in list(members):
                place = f"{base.__name__}.{name}", operator.getitem, members, name
                if not name.startswith("__"):
                    self._offer(name, *place)
                elif hasattr(members[name], "__code__") and name not in _NOT_IN_FORWARD:
                    self._follow(*place)

    def _visit_object(self, path: str, value: Any) -> None:
        """Visit the class of an object, and attributes that code may read."""
        kind, attributes = type(value), getattr(value, "__dict__", {})
        is_layer = issubclass(kind, torch.nn.Module)
        self._visit(kind.__name__, kind)
        bases = [cls for cls in kind.__mro__ if cls not in (object, torch.nn.Module)]
        origins = {_origin(base.__module__) for base in bases}
        names = {*attributes, *({"forward"} if is_layer else ())}
        for base in bases:
            if _origin(base.__module__) == "user":  # the object's may come to hide it
                names.update(name for name in vars(base) if not name.startswith("__"))
            for slot in vars(base).get("__slots__", ()):
                self._offer(slot, f"{path}.{slot}", getattr, value, slot)
        # The code of packages may read any attribute.
        is_open = "package" in origins or (is_layer and "machinery" in origins)
        is_hidden = hasattr(kind, "__getattr__") and not is_layer
        for name in sorted(names - _TORCHS if is_layer else names):
            place = f"{path}.{name}", dict.get, attributes, name, _MISSING
            is_public = is_hidden or not name.startswith("_")
            if is_open and is_public and name in attributes:
                self._follow(*place)
            else:
                self._offer(name, *place)
        for part in _USED if is_layer else ():
            members = attributes.get(part)
            if not isinstance(members, dict):  # a compiled script
                continue
            self._follow(path, len, members)
            for key, member in members.items():
                is_scalar = part == "_buffers" and _buffer(members, key) is not member
                read = _buffer if is_scalar else operator.getitem
                end = f"'s hook {key}" if part.endswith("hooks") else f".{key}"
                self._follow(path + end, read, members, key)


class BakedInValues:
    """The values that the code of a program could read when it was traced.

    A changed value counts only if it changes the program. So the program is called on
    the host when it is compiled, and again after a change.

    Args:
        module: The user's module.
        step: Function that the program calls in the module's place.
        objective: Losses and metrics of a training program. Streamed metrics aren't
            traced.
        call_on_host: Calls the program on the host, and returns a description that is
            equal for equal programs; None if the call isn't possible. Every change
            counts then.

    Attributes:
        may_call: Whether the trace was whole, so that `call_on_host` will end.

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
        call_on_host: Callable[[], object] = lambda: None,
    ) -> None:
        self._roots: dict[str, Any] = {"module": module}
        self._call_on_host = call_on_host
        self._result: object = None
        self.may_call = True
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
        self._readable = ReadableValues(self._roots)

    def _called(self) -> object:
        """Call the program on the host, unless its code asks where it runs."""
        names = self._readable.names
        has_code, asks = names > _ALWAYS_CALLED, "isRunningOnIpu" in names
        return self._call_on_host() if has_code and not asks else None

    def changes(self, when: str = "", *, thoroughly: bool = True) -> str:
        """Describe the changed values if they would change the program.

        Args:
            when: Words for the time of the old values, such as " when the model was
                compiled".
            thoroughly: Compare large constants and containers too.

        Returns:
            Paths with old and new values; "" if there are none.

        Example:
            >>> module = torch.nn.Dropout(0.5)
            >>> values = BakedInValues(module)
            >>> module.p = 0.25
            >>> values.changes()
            'module.p was 0.5 and is 0.25 now'
        """
        readable = self._readable
        changes = list(readable.changes(thoroughly=thoroughly))
        if not changes and (readable.is_complete or not thoroughly):
            return ""
        result = self._called()
        if changes and (result is None or result != self._result):
            texts = dict.fromkeys(readable.described(*c, when) for c in changes)
            return ", ".join([*texts][:3])
        if result != self._result:
            return f"one of more than {SIZE} values has changed"
        self._readable = ReadableValues(self._roots)
        return ""

    def check(self) -> None:
        """Refuse to go on if a value has changed that is compiled into the program.

        Raises:
            ConfigError: A value has changed; the message has its path.
        """
        changes = self.changes(" when the model was compiled", thoroughly=False)
        if changes:
            raise ConfigError(
                f"{changes}: the compiled program has the old value baked in. Change "
                "it between fits, pass it as an input, or make it a 0-d buffer "
                "(register_buffer), which may change at any time."
            )

    @contextlib.contextmanager
    def record_after_trace(
        self, others: Iterable[BakedInValues] = ()
    ) -> Iterator[None]:
        """Record the values again at the end of the context, in which a trace runs.

        Args:
            others: Values of other programs. They accept the changes that the trace
                itself makes, such as those of a counter.

        Warns:
            BakedInWarning: `forward` reads a number and changes it.
        """
        current = [values for values in others if not values.changes()]
        before = self._readable
        try:
            yield
            if self.may_call:
                self._result = self._called()
            counters = [
                f"forward changes {path} (from {old} to {new}) and reads it"
                for (path, _, place, old), new in before.changes(thoroughly=False)
                if {type(old), type(new)} <= {int, float} and self._is_read(*place)
            ]
        finally:
            for values in (self, *current):
                values._readable = ReadableValues(values._roots)
        for what in counters:
            warn_of_baked_in(
                what,
                "the value of that time is baked in, and every batch is computed with "
                "it. Make it a 0-d buffer that a callback changes, or pass it as an "
                "input.",
            )

    def _is_read(self, owner: Any, key: Any = None, *_: Any) -> bool:
        """Return whether the program changes with a number in a dict or list."""
        if self._result is None or key is None or not isinstance(owner, (dict, list)):
            return False
        now = owner[key]
        owner[key] = now + _STEPS
        try:
            return self._called() != self._result
        finally:
            owner[key] = now


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
        self._module, self._parts = module, modules_of(module)
        self._weights = parameters_of(module)
        self._before = self._now()

    def _now(self) -> list[bool]:
        """Return the parts' modes, and whether each parameter requires a gradient.

        No weight is fetched from a device.
        """
        modes = list(map(attrgetter("training"), self._parts))
        if not modes[0]:  # in eval mode as a whole, nothing is frozen
            modes = [True] * len(modes)
        with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
            named = repeat("requires_grad")
            read = object.__getattribute__
            return [*modes, *map(read, self._weights, named)]

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
        at = next(i for i, new in enumerate(now) if new != self._before[i])
        what = "in train mode" if at < len(self._parts) else "trained"
        was, now_is = ("not ", "") if now[at] else ("", "not ")
        name = path_of(self._module, [*self._parts, *self._weights][at])
        raise ConfigError(
            f"{name or 'module'} was {was}{what} when the model was compiled and is "
            f"{now_is}now: the program goes on as it was compiled. Freeze and unfreeze "
            "between fits."
        )


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
