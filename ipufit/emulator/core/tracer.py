# SPDX-License-Identifier: Apache-2.0
"""Run a module's Python once and record its operations.

PopTorch executes `forward` a single time, when the model is compiled, and the device
then repeats what was recorded. So does the emulator: `Tracer` is a `TorchFunctionMode`
that sees every call of torch's Python API, runs it on copies of the weights, and
records it as an operation of the program. Python values are baked in and Python side
effects happen once. Calls on tensors of the host only aren't recorded: they run at
once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import traceback
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Iterator

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils import checkpoint

from .._logging import logger
from ..errors import Error
from .autograd_grad import (
    changed_since,
    function_of,
    memory_of,
    written_by,
)
from .dtypes import DispatchMode, is_importing_compiler
from .float16 import in_float32, rounding
from .graph import (
    DeviceFunction,
    NodesById,
    Operation,
    bind_arguments,
    creates_on_device,
    map_tensors,
    observed,
    overloads,
    requested_device,
    storage_of,
    tensors_in,
)
from .places import PACKAGE, TORCH
from .recording import Recording
from .refusals import (
    host_tensor_among,
    is_whole_number,
    plain_number,
    refuse_arguments,
    refuse_custom_backward,
    refuse_dynamic_shape,
    refuse_gradients,
    refuse_sparse,
    refuse_training_gradients,
    refuse_transforms,
    refuse_value_reader,
    require_differentiable,
    tensors_are_equal,
    text_without_values,
    untraceable,
)
from .slices import with_plain_index

_SCHEMAS = {"interpolate": "__interpolate"}
"""Functions whose schemas have another name."""

_READ_BY_TORCH = frozenset({"narrow", "tensor_split"})
"""Functions that take tensors in such places, which torch reads itself."""

_FACTORIES = frozenset(
    {"empty", "eye", "full", "ones", "rand", "randint", "randn", "randperm", "zeros"}
)
"""Functions whose arguments are sizes, without a tensor."""

_SEVERAL = "int, int, ..."


def with_plain_sizes(operation: Operation, nodes: NodesById) -> Operation:
    """Replace tensors of the host by ints where torch takes ints.

    For a tensor of the device torch would need the value, as `.item()` does. The
    schemas of torch's operators say which arguments take ints.

    Raises:
        Error: A tensor of the device is in such a place.

    Example:
        >>> x, n = torch.zeros(4), torch.tensor(2)
        >>> reshape = Operation(Tensor.reshape, "reshape", (x, n, n), {})
        >>> with_plain_sizes(reshape, {}).args
        (tensor([0., 0., 0., 0.]), 2, 2)
        >>> with_plain_sizes(Operation(Tensor.add, "add", (x, n), {}), {}).args
        (tensor([0., 0., 0., 0.]), tensor(2))
    """
    name, is_index = operation.name, operation.name in ("__getitem__", "__setitem__")
    if is_index or not any(map(is_whole_number, operation.tensors())):
        return operation
    is_method = getattr(Tensor, name, None) is operation.function

    def plain(place: int | str, value: Any) -> Any:
        forms = _forms(name, place, is_method=is_method)
        if isinstance(value, Tensor):
            is_taken = _SEVERAL in forms or ("int" in forms and value.dim() == 0)
            is_taken = is_taken or (bool(forms) and id(value) in nodes)
            return plain_number(value, nodes, name) if is_taken else value
        if "List[int]" in forms and isinstance(value, (tuple, list)):
            return type(value)(plain_number(v, nodes, name) for v in value)
        return value

    return replace(
        operation,
        args=tuple(plain(place, value) for place, value in enumerate(operation.args)),
        kwargs={key: plain(key, value) for key, value in operation.kwargs.items()},
    )


@functools.lru_cache(maxsize=None)
def _forms(name: str, place: int | str, *, is_method: bool) -> set[str]:
    """Return the forms in which a function takes ints as an argument; empty if none."""

    def form(kind: str) -> str:
        if "Tensor" in kind:
            return "Tensor"
        return kind[len("Optional[") : -1] if kind.startswith("Optional[") else kind

    found: set[str] = set()
    for overload in overloads(_SCHEMAS.get(name, name)):
        forms = {name: form(kind) for name, kind in overload.kinds.items()}
        positional = [forms.get(name, "") for name in overload.places]
        if positional[:1] != ["Tensor"] and name not in _FACTORIES:
            continue  # a form for strings and lists of TorchScript
        if isinstance(place, str):
            found.add(forms.get(place, ""))
        elif place and is_method and positional[1:] == ["List[int]"]:
            found.update(("List[int]", _SEVERAL))  # as in `x.view(2, 3)`
        else:
            found.update(positional[place : place + 1])
    if "Tensor" in found and name not in _READ_BY_TORCH:
        return set()
    return found & {"int", "List[int]", _SEVERAL}


_ANSWERS: dict[str, Callable[[Operation], Any]] = {
    "__repr__": text_without_values,
    "equal": tensors_are_equal,
}
"""Functions that are answered while tracing, without an operation of the program."""

REFUSALS: dict[str, Callable[[Operation], None]] = {
    "value": refuse_value_reader,
    "gradients": refuse_gradients,
    "shape": refuse_dynamic_shape,
    "arguments": refuse_arguments,
}
"""Refuse operations on the device's tensors that don't compile, in this order."""

TRAINING_REFUSALS = {**REFUSALS, "gradients": refuse_training_gradients}
"""The same in a trace for training."""

_OF_DEVICE = {
    "device": torch.device("ipu:0"),
    "is_cpu": False,
    "is_ipu": True,
}
"""Properties of a device's tensor that tell where it is."""

_MOVES = frozenset({"to", "type_as"})
_LINES_WITHOUT_DEVICE: set[tuple[Any, ...]] = set()
"""Source lines that made a tensor without a device, in any program."""

_RETURN_NOTHING = frozenset({"__setitem__", "__set__"})


class Tracer(TorchFunctionMode):
    """Records the torch calls that are made while it is active.

    Args:
        recording: The recording to append them to.

    Attributes:
        recording: The recording.
        refusals: Functions that refuse what doesn't compile.
        escape: The refusal of an operator that the tracer hasn't seen, if any.
        differentiated: While autograd runs: the tensors of the trace, by their memory.
        parts: ATen operators that functions of `forward` consist of, by the memory of
            their results, which autograd may keep: the operator, its arguments, the
            versions of the tensors among them, and its results.
        has_warned_of_device: Whether it has warned of a tensor without a device.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.recording = recording
        self.refusals = TRAINING_REFUSALS if recording.is_training else REFUSALS
        self.escape: Error | None = None
        self.differentiated: dict[tuple[Any, ...], Tensor] | None = None
        self.parts: dict[tuple[Any, ...], tuple[Any, Any, list[int], Any]] = {}
        self.has_warned_of_device = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, on copies of the weights, and record it."""
        if is_importing_compiler():
            return func(*args, **(kwargs or {}))
        func = func.function if isinstance(func, DeviceFunction) else func
        name = getattr(func, "__name__", str(func))
        kwargs = kwargs or {}
        if name == "to":
            args = (*args[:1], *map(_in_memory, args[1:]))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _in_memory(kwargs["device"])}
        operation = bind_arguments(Operation(func, name, args, kwargs))
        refuse_transforms(operation)
        if name == "new" and isinstance(args[-1], torch.Size):
            # In a graph the size becomes a tuple, and `new` of a tuple takes values.
            operation = replace(operation, function=Tensor.new_empty, name="new_empty")
        operation = with_plain_sizes(operation, self.recording.nodes)
        operation = with_plain_index(operation, self.recording.nodes)
        touched = operation.tensors()
        on_device = [t for t in touched if self.recording.is_on_device(t)]
        is_creating = creates_on_device(operation)
        if not on_device and not is_creating:
            return operation.run()  # the host's, which no program repeats
        if is_creating and requested_device(operation) is None:
            self._warn_of_device(name)
        if on_device and operation.name in _ANSWERS:
            return _ANSWERS[operation.name](operation)
        if on_device and name == "__get__" and _tells_device(func):
            return _OF_DEVICE[func.__self__.__name__]  # type: ignore[attr-defined]
        if _sets_requires_grad(operation):
            weight = storage_of(self.recording.on_device(on_device[0]))
            is_weight = weight in self.recording.weight_memory()
            if not (is_weight and self.recording.is_training):  # there it is too late
                self.compute(operation)  # it tells autograd, and is no operator
            return args[0] if name == "requires_grad_" else None
        # Creation takes constants from the host.
        self.check(operation, on_device, [] if is_creating else touched)
        self.recording.is_running_operation = True
        try:
            if func is torch.autograd.grad:
                result = self._differentiate(operation)
            else:
                result = self._run(in_float32(operation))
        finally:
            self.recording.is_running_operation = False
        return map_tensors(result, self.recording.on_host)

    def check(
        self, operation: Operation, on_device: list[Tensor], touched: list[Tensor]
    ) -> None:
        """Refuse an operation that PopTorch doesn't compile.

        Args:
            operation: The operation.
            on_device: Tensors of the device among its arguments.
            touched: Tensors that must be on the device.

        Raises:
            Error: It breaks a rule.
        """
        if on_device:
            for topic, refuse in self.refusals.items():
                self.attempt(topic, refuse, operation)
            for tensor in on_device if self.recording.is_training else ():
                self.attempt("own backward", refuse_custom_backward, tensor)
        self.attempt("host tensor", self.refuse_host_tensors, operation.name, touched)

    def attempt(self, topic: str, refuse: Callable[..., None], *args: Any) -> None:
        """Call a function that raises an `Error` if it refuses; a survey notes it."""
        refuse(*args)

    def _warn_of_device(self, name: str) -> None:
        """Warn once a program, and once for a line, of a tensor without a device."""
        if _asking_file().startswith(TORCH):
            return
        place = self.recording.here()
        if not self.has_warned_of_device and place[:2] not in _LINES_WITHOUT_DEVICE:
            self.has_warned_of_device = True
            logger.warning(
                "No device set in torch.%s() (%s): forcing to IPU. Pass `device`, for "
                "example that of an input, wherever `forward` makes a tensor.",
                *(name, place),
            )
        _LINES_WITHOUT_DEVICE.add(place[:2])

    def compute(self, operation: Operation) -> Any:
        """Run an operation on the copies of the weights."""
        on_device = self.recording.on_device
        return operation.function(
            *map_tensors(operation.args, on_device),
            **map_tensors(operation.kwargs, on_device),
        )

    def escaped(self, func: Callable[..., Any]) -> None:
        """Refuse an operator that the tracer hasn't seen.

        Raises:
            Error: Always.
        """
        self.escape = untraceable(func)
        raise self.escape

    def _run(self, operation: Operation) -> Any:
        touched = operation.tensors()
        on_device = list(map(self.recording.on_device, touched))

        def compute() -> Any:
            result = self.compute(operation)
            for tensor in tensors_in(result):
                refuse_sparse(tensor, f"the result of `{operation.name}`")
            host = [t for t in touched if not self.recording.is_on_device(t)]
            # As if moved: both are in the host's memory.
            return result.clone() if any(result is t for t in host) else result

        result, effects = observed(operation.name, on_device, compute)
        is_kept = bool(tensors_in(result)) or operation.name in _RETURN_NOTHING
        if is_kept or effects.writes:
            self.recording.append(operation, effects, result)
        return result

    def _differentiate(self, operation: Operation) -> Any:
        """Run `torch.autograd.grad`; `record_operator` gets the operators it calls."""
        require_differentiable(operation)
        tensors = map(self.recording.on_device, self.recording.tensors())
        self.differentiated = {memory_of(tensor): tensor for tensor in tensors}
        try:
            with rounding(is_stochastic=False):  # the program does it when it runs
                gradients = Tracer.compute(self, operation)
            return map_tensors(gradients, self._under_known_name)
        finally:
            self.differentiated = None

    def note_part(self, operator: Any, given: Any, result: Any) -> None:
        """Note an ATen operator that a function of `forward` consists of.

        Autograd keeps tensors of the function's inside, for which the program has no
        node yet.
        """
        operands = tensors_in(given)
        part = operator, given, [tensor._version for tensor in operands], result
        aliases = {*map(memory_of, operands)}  # as `detach` returns one
        for memory in map(memory_of, tensors_in(result)):
            if operator._schema.is_mutable:
                self.parts[memory] = part
            elif memory not in aliases:
                self.parts.setdefault(memory, part)

    def record_operator(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an ATen operator of a backward pass, and record it."""
        args, kwargs = map_tensors((args, kwargs), self._under_known_name)
        function = function_of(operator)
        operation = in_float32(Operation(function, function.__name__, args, kwargs))
        compute = partial(Tracer.compute, self, operation)
        result, effects = observed(operation.name, operation.tensors(), compute)
        if tensors_in(result):
            writes = written_by(operator, args)
            is_operator = effects.is_operator or bool(writes)
            effects = replace(effects, writes=writes, is_operator=is_operator)
            self.recording.append(operation, effects, result)
            for tensor in tensors_in(result):
                self.differentiated[memory_of(tensor)] = tensor  # type: ignore[index]
        return result

    def _under_known_name(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the trace that a tensor of autograd's is.

        Raises:
            Error: The program can't compute it.
        """
        known, memory = self.differentiated, memory_of(tensor)
        if known is None or self.recording.is_on_device(tensor):
            return tensor
        if memory not in known and memory in self.parts:
            operator, given, versions, result = self.parts[memory]
            before = tensors_in(given)
            if operator._schema.is_mutable or versions != [t._version for t in before]:
                raise changed_since(operator)
            notes, self.recording.notes = self.recording.notes, {}
            again = Tracer.record_operator(self, operator, *given)
            self.recording.notes = notes
            names = map(memory_of, tensors_in(result))
            known.update(zip(names, tensors_in(again)))
        if memory not in known and tensor.dim():
            raise host_tensor_among("torch.autograd.grad", tensor)
        return known.get(memory, tensor)

    def refuse_host_tensors(self, name: str, touched: list[Tensor]) -> None:
        """Refuse tensors of the host, except in an operation that moves them.

        Raises:
            Error: A tensor is the host's.
        """
        if name in _MOVES:
            touched = touched[1:]
        elif name == "copy_":
            touched = touched[:1]
        self.recording.require_device(name, touched)


def _sets_requires_grad(operation: Operation) -> bool:
    """Return whether an operation is `x.requires_grad_()` or an assignment to it."""
    name = operation.name
    if name == "__set__":
        name = operation.function.__self__.__name__  # type: ignore[attr-defined]
    return name in ("requires_grad", "requires_grad_")


def _tells_device(getter: Any) -> bool:
    """Return whether a property of a tensor on the device tells where it is."""
    if getter.__self__.__name__ not in _OF_DEVICE:
        return False
    # It would look for a module `torch.ipu`.
    return _asking_file() != checkpoint.__file__


def _asking_file() -> str:
    """Return the source file whose code calls torch."""
    frames = traceback.walk_stack(sys._getframe(1))
    files = (frame.f_code.co_filename for frame, _ in frames)
    return next((file for file in files if not file.startswith(PACKAGE)), "")


def _in_memory(device: Any) -> Any:
    """Return "cpu" for the host, and the host's device for an emulated IPU."""
    if not isinstance(device, (str, torch.device)):
        return device
    kind = str(device).partition(":")[0]
    return {"cpu": "cpu", "ipu": torch.device("cpu")}.get(kind, device)


@contextlib.contextmanager
def guarded(tracer: Tracer) -> Iterator[None]:
    """Record calls inside the context; a guard sees operators that no tracer does."""
    is_validated = Distribution._validate_args
    Distribution.set_default_validate_args(False)  # nobody knows the values yet
    try:
        with visible_indexing(), EscapeGuard(tracer), tracer:
            yield
    finally:
        Distribution.set_default_validate_args(is_validated)


_INDEXING_ESCAPES = torch.__version__.startswith("2.0.")

_POINTER = ctypes.sizeof(ctypes.c_void_p)
_AS_SEQUENCE = 13
"""Position of `tp_as_sequence` in CPython's `PyTypeObject`, in pointers."""
_INDEXING = {"__getitem__": 3, "__setitem__": 5}
"""Position of these methods in `PySequenceMethods`."""


@contextlib.contextmanager
def visible_indexing() -> Iterator[None]:
    """Show `tensor[i]` to modes: torch 2.0 hides most kinds of index from them."""
    if not _INDEXING_ESCAPES:
        yield
        return

    def shown(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def access(self: Tensor, *index: Any) -> Any:
            if has_torch_function((self,)):
                # `access`, not the original, so that every mode on the stack sees it.
                return handle_torch_function(access, (self,), self, *index)
            return original(self, *index)

        return access

    slots = [_sequence_slot(Tensor, position) for position in _INDEXING.values()]
    before = [slot.value for slot in slots]
    for name in _INDEXING:
        setattr(Tensor, name, shown(getattr(Tensor, name)))
    try:
        yield
    finally:
        for name in _INDEXING:
            delattr(Tensor, name)  # which brings the inherited one back
        for slot, value in zip(slots, before):
            slot.value = value


def _sequence_slot(cls: type, position: int) -> ctypes.c_void_p:
    """Return a C slot whose method makes instances of `cls` sequences.

    Setting `__getitem__` fills such a slot, deleting `__getitem__` doesn't clear it.
    Then `torch.tensor([torch.tensor(1)])` takes the inner tensor for a sequence.
    """
    table = ctypes.c_void_p.from_address(id(cls) + _AS_SEQUENCE * _POINTER).value
    return ctypes.c_void_p.from_address((table or 0) + position * _POINTER)


class EscapeGuard(DispatchMode):
    """Refuses operators on the device's tensors that aren't traced.

    TorchScript and the transforms of `torch.func` call operators directly. Without the
    guard their results would become constants of the program, silently. The guard
    raises its error again on leaving, since TorchScript replaces errors by its own.

    Args:
        tracer: Tracer of the trace to guard.
    """

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._tracer = tracer

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, or refuse it if it has a tensor of the device."""
        recording, given = self._tracer.recording, (args, kwargs or {})
        if self._tracer.differentiated is not None:
            return self._tracer.record_operator(func, *given)
        is_seen = recording.is_running_operation
        if not is_seen and any(map(recording.is_on_device, tensors_in(given))):
            self._tracer.escaped(func)
            given = map_tensors(given, recording.on_device)
        result = func(*given[0], **given[1])
        if is_seen and torch.is_grad_enabled() and not recording.is_training:
            self._tracer.note_part(func, given, result)
        return result

    def __exit__(self, *exception: Any) -> None:
        """Leave the mode, and raise the refusal, if any."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call,unused-ignore]
        if self._tracer.escape is not None:
            raise self._tracer.escape
