# SPDX-License-Identifier: Apache-2.0
"""Run a module's Python once and record its operations.

PopTorch executes `forward` a single time, when the model is compiled, and the
device then repeats what was recorded. So does the emulator: `Tracer` is a
`TorchFunctionMode` that sees every call of torch's Python API, runs it on copies of
the weights, and records it as an operation of the program. Python values are baked in
and Python side effects happen once. Calls that touch tensors of the host only are none
of the device's business: they run there and then.
"""

from __future__ import annotations

from typing import Any, Callable

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ipufit.emulator._ground.without_compiler import is_importing_compiler
from ipufit.emulator._tracing.half import in_float32
from ipufit.emulator._tracing.limits import refuse_unsupported
from ipufit.emulator._tracing.liveness import MemoryWatch
from ipufit.emulator._tracing.moving_slices import (
    with_constant_bounds,
    with_moving_slices,
)
from ipufit.emulator._tracing.operands import has_tensors, map_tensors
from ipufit.emulator._tracing.operation import NodesById, Operation, recorded
from ipufit.emulator._tracing.recording import Recording
from ipufit.emulator._tracing.refusals import (
    host_tensor_among,
    refuse_custom_backward,
    refuse_dynamic_shape,
    refuse_gradients,
    refuse_value_reader,
    tensors_are_equal,
    text_without_values,
)
from ipufit.emulator._tracing.sizes import new_of_size, with_plain_sizes
from ipufit.emulator._tracing.tensor_devices import (
    HostDevices,
    creates_on_device,
    with_emulated_devices,
)

_REWRITES: tuple[Callable[[Operation, NodesById], Operation], ...] = (
    with_emulated_devices,
    new_of_size,
    with_plain_sizes,
    with_constant_bounds,
    with_moving_slices,
)
"""Change an operation into the form that runs and is recorded, in this order."""

_ANSWERS: dict[str, Callable[[Operation], Any]] = {
    "__repr__": text_without_values,
    "equal": tensors_are_equal,
}
"""Functions that are answered while tracing, without an operation of the program."""

_REFUSALS: tuple[Callable[[Operation], None], ...] = (
    refuse_value_reader,
    refuse_gradients,
    refuse_dynamic_shape,
    refuse_unsupported,
)
"""Refuse operations on the device's tensors that don't compile, in this order."""

_MOVES = frozenset({"to", "type_as"})
_RETURN_NOTHING = frozenset({"__setitem__", "__set__"})


class Tracer(TorchFunctionMode):
    """Record the torch calls made while active.

    Args:
        recording: The recording to append them to.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.recording = recording
        self._host_devices = HostDevices()

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
        func = recorded(func)
        name = getattr(func, "__name__", str(func))
        operation = Operation(func, name, args, kwargs or {})
        operation = self._host_devices.named(operation)
        for rewrite in _REWRITES:
            operation = rewrite(operation, self.recording.nodes)
        touched = operation.tensors()
        on_device = [t for t in touched if self.recording.is_on_device(t)]
        is_creating = creates_on_device(operation)
        if not on_device and not is_creating:
            # The host's, which no program repeats.
            return self._host_devices.noted(operation, operation.run())
        if on_device and operation.name in _ANSWERS:
            return _ANSWERS[operation.name](operation)
        # Creation takes constants from the host.
        self.check(operation, on_device, [] if is_creating else touched)
        self.recording.is_running_operation = True
        try:
            result = self._run(in_float32(operation))
        finally:
            self.recording.is_running_operation = False
        return map_tensors(result, self.recording.weights.on_host)

    def check(
        self, operation: Operation, on_device: list[Tensor], touched: list[Tensor]
    ) -> None:
        """Refuse an operation that doesn't compile.

        Args:
            operation: The operation.
            on_device: Tensors of the device among its arguments.
            touched: Tensors that have to be on the device.

        Raises:
            Error: It breaks a rule.
        """
        if on_device:
            for refuse in _REFUSALS:
                refuse(operation)
            for tensor in on_device:
                refuse_custom_backward(tensor)
        self.refuse_host_tensors(operation.name, touched)

    def compute(self, operation: Operation) -> Any:
        """Run an operation on the copies of the weights."""
        on_device = self.recording.weights.on_device
        return operation.function(
            *map_tensors(operation.args, on_device),
            **map_tensors(operation.kwargs, on_device),
        )

    def _run(self, operation: Operation) -> Any:
        touched = operation.tensors()
        on_device = self.recording.weights.on_device
        watch = MemoryWatch(operation.name, list(map(on_device, touched)))
        result = self.compute(operation)
        host = [t for t in touched if not self.recording.is_on_device(t)]
        if any(result is tensor for tensor in host):
            result = result.clone()  # as if moved: both are in the host's memory
        effects = watch.effects(result)
        is_kept = has_tensors(result) or operation.name in _RETURN_NOTHING
        if is_kept or effects.writes:
            self.recording.append(operation, effects, result)
        return result

    def refuse_host_tensors(self, name: str, touched: list[Tensor]) -> None:
        """Refuse tensors of the host, but for those that an operation moves.

        Raises:
            Error: There is one.
        """
        allowed: list[Tensor] = []
        if name in _MOVES:
            allowed = touched[:1]
        elif name == "copy_":
            allowed = touched[1:]
        for tensor in touched:
            is_allowed = any(tensor is other for other in allowed)
            if not self.recording.is_on_device(tensor) and not is_allowed:
                raise host_tensor_among(name, tensor)
