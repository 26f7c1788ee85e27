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
import itertools
import sys
import traceback
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Iterator

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.fx.node import Node
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils import checkpoint

from .._logging import logger
from ..errors import Error, createPoptorchError
from .autograd_grad import function_of, memory_of, refusal_of_operator, written_by
from .composed import PARTS, composition_of
from .float16 import ROUNDING, rounded, rounding, rounding_of
from .graph import (
    PACKAGE,
    TORCH,
    DeviceFunction,
    DispatchMode,
    NodesById,
    Operation,
    Place,
    add_place,
    base_name,
    bind_arguments,
    creates_on_device,
    is_importing_compiler,
    is_whole_number,
    map_tensors,
    observed,
    overloads,
    requested_device,
    storage_of,
    tensors_in,
    with_long_indices,
)
from .operators import Finding
from .recording import REFUSAL, Recording, refuse_rebound
from .refusals import (
    host_tensor_among,
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
from .slices import moving_slices, size_of_slice
from .strict import (
    NEWER,
    Unsupported,
    compiled_operators,
    newer_parts,
    operators_of,
    refuse_unsupported,
    supported_operators,
)

_SCHEMAS = {"interpolate": "__interpolate"}
"""Functions whose schemas have another name."""

_READ_BY_TORCH = frozenset({"narrow", "tensor_split"})
"""Functions that take tensors in such places, which torch reads itself."""


def with_plain_numbers(operation: Operation, nodes: NodesById) -> Operation:
    """Replace tensors of the host by ints where torch takes ints, as in `x[index]`.

    For a tensor of the device torch would need the value, as `.item()` does. They stay
    tensors where torch takes these, too. Slices whose ends are on the device turn an
    operation into `moving_slices`.

    Raises:
        Error: A tensor of the device is in such a place.

    Example:
        >>> x, n = torch.zeros(4), torch.tensor(2)
        >>> reshape = Operation(Tensor.reshape, "reshape", (x, n, n), {})
        >>> with_plain_numbers(reshape, {}).args
        (tensor([0., 0., 0., 0.]), 2, 2)
        >>> with_plain_numbers(Operation(Tensor.add, "add", (x, n), {}), {}).args
        (tensor([0., 0., 0., 0.]), tensor(2))
    """
    name, args, kwargs = operation.name, operation.args, operation.kwargs
    if not any(map(is_whole_number, operation.tensors)):
        return operation
    if name in ("__getitem__", "__setitem__"):
        return _with_plain_index(operation, nodes)
    forms = overloads(_SCHEMAS.get(name, name))
    if name not in _READ_BY_TORCH and any(form.takes(args, kwargs) for form in forms):
        return operation
    readers = (form for form in forms if form.takes(args, kwargs, reads=True))
    form = next(readers, None)
    if form is None:
        return operation
    kinds = form.kinds

    def plain(place: str, value: Any) -> Any:
        if "int" not in kinds[place]:
            return value
        if isinstance(value, (tuple, list)):
            return type(value)(plain_number(v, nodes, name) for v in value)
        return plain_number(value, nodes, name)

    places = itertools.chain(form.places, itertools.repeat(form.places[-1]))
    return replace(
        operation,
        args=tuple(map(plain, places, args)),
        kwargs={key: plain(key, value) for key, value in kwargs.items()},
    )


def _with_plain_index(operation: Operation, nodes: NodesById) -> Operation:
    name = operation.name
    tensor, index, *values = operation.args
    parts, sizes = list(index if isinstance(index, tuple) else (index,)), {}
    for place, part in enumerate(parts):
        if isinstance(part, slice):
            start, stop, step = (
                int(end) if isinstance(end, Tensor) and id(end) not in nodes else end
                for end in (part.start, part.stop, part.step)
            )
            parts[place] = slice(start, stop, step)
            if isinstance(start, Tensor) or isinstance(stop, Tensor):
                sizes[place] = size_of_slice(start, stop, nodes)
        elif isinstance(part, Tensor) and part.dim() == 0 and part.dtype != torch.uint8:
            parts[place] = plain_number(part, nodes, name)
    index = tuple(parts) if isinstance(index, tuple) else parts[0]
    if sizes and name == "__getitem__":
        args = (tensor, index, sizes)
        return Operation(moving_slices, moving_slices.__name__, args, {})
    return replace(operation, args=(tensor, index, *values))


REFUSALS: dict[str, Callable[[Operation], None]] = {
    "value": refuse_value_reader,
    "gradients": refuse_gradients,
    "shape": refuse_dynamic_shape,
    "arguments": refuse_arguments,
}
"""Refuse operations on the device's tensors that don't compile, in this order."""

_OF_DEVICE = {"device": torch.device("ipu:0"), "is_cpu": False, "is_ipu": True}
"""Properties of a device's tensor that tell where it is."""

_MOVES = frozenset({"to", "type_as"})
_LINES_WITHOUT_DEVICE: set[tuple[Any, ...]] = set()
"""Source lines that made a tensor without a device, in any program."""

_RETURN_NOTHING = frozenset({"__setitem__", "__set__"})


class Report:
    """Ends a compilation at what is refused first; a check notes everything.

    Attributes:
        recording: The trace under way.
    """

    recording: Recording | None = None

    def attempt(
        self,
        topic: str,
        check: Callable[..., Any],
        *args: Any,
        place: Place | None = None,
    ) -> bool:
        """Call a function that raises an `Error` if it refuses.

        Args:
            topic: Subject of the refusal.
            check: The function.
            *args: Its arguments.
            place: The place of what is refused, unless the error has nodes; None for
                the place being traced.

        Returns:
            Whether it has refused; it may do so only if the compilation goes on.
        """
        check(*args)
        return False

    def refuse(self, topic: str, error: Error) -> None:
        """Refuse the program."""
        raise error

    def refuse_rebound(self, module: torch.nn.Module, problems: list[str]) -> None:
        """Refuse assignments to names of weights."""
        for problem in problems:
            refuse_rebound(problem)

    def goes_on_after(
        self, error: Exception, module: torch.nn.Module, problems: list[str]
    ) -> bool:
        """Hear of an error that ended the trace; return whether to go on without it."""
        if isinstance(error, Error):
            # A weight that was replaced explains best why it can't be used.
            self.refuse_rebound(module, problems)
            recording: Any = self.recording
            add_place(error, recording.tracing_function, recording.running[-1])
        return False

    def see(self, operation: Operation, result: Any) -> None:
        """Hear of an operation that was recorded."""

    def compare(self) -> None:
        """Hear that tensors of the device are compared by `torch.equal`."""

    def remark(self, finding: Finding, node: Node) -> None:
        """Hear of an operation that a device computes otherwise than torch."""

    def refuse_unsupported(self, unsupported: list[Unsupported]) -> None:
        """Refuse operators that PopTorch doesn't compile, or warn of them."""
        refuse_unsupported(unsupported)


class Tracer(TorchFunctionMode):
    """Records the torch calls that are made while it is active.

    Args:
        recording: The recording to append them to.
        report: Hears what is refused.

    Attributes:
        recording: The recording.
        differentiated: While autograd runs: the tensors of the trace, by their memory.
        parts: The ATen operators of the function that runs, their arguments and
            results.
        parts_by_memory: Operators of all functions, by the memory of their results,
            which autograd may keep: the operator, its arguments, the versions of the
            tensors among them, and its results.
        has_warned_of_device: Whether it has warned of a tensor without a device.
    """

    def __init__(self, recording: Recording, report: Report) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.recording, self.report = recording, report
        self.differentiated: dict[tuple[Any, ...], Tensor] | None = None
        self.parts: list[tuple[Any, Any, Any]] = []
        self.parts_by_memory: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self.has_warned_of_device = False
        self._refused_kinds: set[type] = set()

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
        operation = with_long_indices(operation)
        refuse_transforms(operation)
        if name == "new" and isinstance(args[-1], torch.Size):
            # In a graph the size becomes a tuple, and `new` of a tuple takes values.
            operation = replace(operation, function=Tensor.new_empty, name="new_empty")
        operation = with_plain_numbers(operation, self.recording.nodes)
        operands = operation.tensors
        on_device = [t for t in operands if self.recording.is_on_device(t)]
        is_creating = creates_on_device(operation)
        if not on_device and not is_creating:
            return operation.run()  # the host's, which no program repeats
        if is_creating and requested_device(operation) is None:
            self._warn_of_device(name)
        if on_device and name == "equal":
            if not _asking_file().startswith(TORCH):
                self.report.compare()
            return tensors_are_equal(operation)
        if on_device and name == "__repr__":
            return text_without_values(operation)
        if on_device and name == "__get__" and _tells_device(func):
            return _OF_DEVICE[func.__self__.__name__]  # type: ignore[attr-defined]
        if _sets_requires_grad(operation):
            weight = storage_of(self.recording.on_device(on_device[0]))
            is_weight = weight in self.recording.weight_memory()
            if not (is_weight and self.recording.is_training):  # there it is too late
                self.compute(operation)  # it tells autograd, and is no operator
            return args[0] if name == "requires_grad_" else None
        if operation.name in PARTS:
            is_training = self.recording.is_training
            compose = composition_of(operation, is_training=is_training)
            if compose is not None:
                with self:  # it sees the parts
                    return compose(*operation.args, **operation.kwargs)
        # Creation takes constants from the host.
        self.check(operation, on_device, [] if is_creating else operands)
        self.recording.is_running_operation = True
        try:
            is_grad = func is torch.autograd.grad
            result = (self._differentiate if is_grad else self._run)(operation)
        finally:
            self.recording.is_running_operation = False
        return map_tensors(result, self.recording.on_host)

    def check(
        self, operation: Operation, on_device: list[Tensor], operands: list[Tensor]
    ) -> None:
        """Refuse an operation that PopTorch doesn't compile.

        Args:
            operation: The operation.
            on_device: Tensors of the device among its arguments.
            operands: Tensors that must be on the device.

        Raises:
            Error: It breaks a rule.
        """
        is_training, attempt = self.recording.is_training, self.report.attempt
        self.recording.refused = ""
        for topic, refuse in (REFUSALS if on_device else {}).items():
            if is_training and topic == "gradients":
                refuse = refuse_training_gradients
            if attempt(topic, refuse, operation):
                self.recording.refused = topic
        for tensor in on_device if is_training else ():
            kind = type(tensor.grad_fn)
            if kind not in self._refused_kinds and attempt(
                "own backward", refuse_custom_backward, tensor
            ):
                self._refused_kinds.add(kind)
        if operation.name in _MOVES:
            operands = operands[1:]
        elif operation.name == "copy_":
            operands = operands[:1]
        require_device = self.recording.require_device
        attempt("host tensor", require_device, operation.name, operands)

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

    def compute(self, operation: Operation, rounding: str = "") -> Any:
        """Run an operation on the copies of the weights."""
        function = rounded(operation.function, operation.name, rounding)
        args = map_tensors(operation.args, self.recording.on_device)
        kwargs = map_tensors(operation.kwargs, self.recording.on_device)
        if operation.name in ("numpy", "__array__"):  # refused, and a check goes on
            args = map_tensors(args, torch.detach)
        return function(*args, **kwargs)

    def _run(self, operation: Operation) -> Any:
        operands = operation.tensors
        rounding = rounding_of(operation)

        def compute() -> Any:
            result = self.compute(operation, rounding)
            for tensor in tensors_in(result):
                refuse_sparse(tensor, f"the result of `{operation.name}`")
            host = [t for t in operands if not self.recording.is_on_device(t)]
            # As if moved: both are in the host's memory.
            return result.clone() if any(result is t for t in host) else result

        self.parts = []
        on_device = list(map(self.recording.on_device, operands))
        result, effects = observed(operation.name, on_device, compute)
        is_kept = bool(tensors_in(result)) or operation.name in _RETURN_NOTHING
        if is_kept or effects.writes:
            notes: dict[str, Any] = {ROUNDING: rounding}
            if base_name(operation.name) not in supported_operators():
                notes["operators"] = operation.function, operators_of(self.parts)
            newer = newer_parts(operation)
            if newer:
                notes[NEWER] = operation.function, newer
            self.recording.append(operation, effects, result, **notes)
            self.report.see(operation, result)
        return result

    def _differentiate(self, operation: Operation) -> Any:
        """Run `torch.autograd.grad`; `record_operator` gets the operators it calls."""
        require_differentiable(operation)
        tensors = map(self.recording.on_device, self.recording.tensors())
        self.differentiated = {memory_of(tensor): tensor for tensor in tensors}
        try:
            with rounding(is_stochastic=False):  # the program does it when it runs
                gradients = self.compute(operation)
            self.report.see(operation, gradients)
            return map_tensors(gradients, self._under_known_name)
        finally:
            self.differentiated = None

    def note_part(self, operator: Any, arguments: Any, result: Any) -> None:
        """Note an ATen operator that a function of `forward` consists of.

        Autograd keeps tensors of the function's inside, for which the program has no
        node yet.
        """
        self.parts.append((operator, arguments, result))
        if self.recording.is_training or not torch.is_grad_enabled():
            return
        operands = tensors_in(arguments)
        part = operator, arguments, [tensor._version for tensor in operands], result
        aliases = {*map(memory_of, operands)}  # as `detach` returns one
        for memory in map(memory_of, tensors_in(result)):
            if operator._schema.is_mutable:
                self.parts_by_memory[memory] = part
            elif memory not in aliases:
                self.parts_by_memory.setdefault(memory, part)

    def record_operator(
        self,
        operator: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_of_forward: bool = False,
    ) -> Any:
        """Run an ATen operator of a backward pass, and record it.

        Args:
            operator: The operator.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            is_of_forward: Whether it repeats a part of `forward` that autograd keeps.
        """
        name = base_name(operator._schema.name.partition("::")[2])
        refusal = refusal_of_operator(name, args, compiled_operators())
        args, kwargs = map_tensors((args, kwargs), self._under_known_name)
        function = function_of(operator)
        operation = Operation(function, function.__name__, args, kwargs)
        rounding = rounding_of(operation)
        compute = partial(self.compute, operation, rounding)
        result, effects = observed(operation.name, operation.tensors, compute)
        if tensors_in(result):
            writes = written_by(operator, args)
            is_operator = effects.is_operator or bool(writes)
            effects = replace(effects, writes=writes, is_operator=is_operator)
            notes: dict[str, Any] = {ROUNDING: rounding}
            if refusal and not is_of_forward:
                notes[REFUSAL] = "gradients", refusal
            self.recording.append(operation, effects, result, **notes)
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
        if memory not in known and memory in self.parts_by_memory:
            operator, arguments, versions, result = self.parts_by_memory[memory]
            before = tensors_in(arguments)
            if operator._schema.is_mutable or versions != [t._version for t in before]:
                raise createPoptorchError(
                    "torch.autograd.grad() needs what a function of torch has computed "
                    f"inside, and the emulator can't record that ({operator}): it was "
                    "changed in place since. Compose the function of simpler ones."
                )
            again = self.record_operator(operator, *arguments, is_of_forward=True)
            names = map(memory_of, tensors_in(result))
            known.update(zip(names, tensors_in(again)))
        if memory not in known and tensor.dim():
            raise host_tensor_among("torch.autograd.grad", tensor)
        return known.get(memory, tensor)


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
    skipped = PACKAGE, f"{TORCH}overrides"
    return next((file for file in files if not file.startswith(skipped)), "")


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
        with unread_masks(), visible_indexing(), EscapeGuard(tracer), tracer:
            yield
    finally:
        Distribution.set_default_validate_args(is_validated)


@contextlib.contextmanager
def unread_masks() -> Iterator[None]:
    """Take no attention mask for a causal one unless the caller says that it is.

    torch 2.1 and newer compare the values of masks, which aren't there in a trace.
    torch 2.0.1, that of IPUs, does so by `torch.equal`, which is False then.
    """
    name = "_detect_is_causal_mask"
    finds = getattr(transformer, name, None)
    if finds is None:
        yield
        return

    def is_said_causal(
        mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
    ) -> bool:
        return is_causal is True

    setattr(transformer, name, is_said_causal)
    try:
        yield
    finally:
        setattr(transformer, name, finds)


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
        self._refusal: Error | None = None

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
            if str(func) == "aten.view.default" and args[1] == list(args[0].shape):
                # torch 2.0: a torch.autograd.Function, such as a hook's, returns
                # its argument. A device runs the view.
                return args[0].view(args[1])
            error = untraceable(func)
            try:
                self._tracer.report.refuse("tracing", error)
            except Error:
                self._refusal = error
                raise
            given = map_tensors(given, recording.on_device)
        result = func(*given[0], **given[1])
        if is_seen:
            self._tracer.note_part(func, given, result)
        return result

    def __exit__(self, *exception: Any) -> None:
        """Leave the mode, and raise the refusal, if any."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call,unused-ignore]
        if self._refusal is not None:
            raise self._refusal
