# SPDX-License-Identifier: Apache-2.0
"""The trace under way, for the functions that a module calls in `forward`."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, Iterator

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ipufit.emulator._tracing.operation import DeviceFunction, tensors_in
from ipufit.emulator._tracing.refusals import host_tensor_among
from ipufit.emulator.errors import createPoptorchError

if TYPE_CHECKING:
    from ipufit.emulator._tracing.recording import Recording


@dataclass
class Trace:
    """A trace under way: its recording, and the constructs that are open.

    Attributes:
        recording: The operations recorded so far.
        is_training: Whether the program will be differentiated.
        open: Names of the constructs that are not finished, innermost last.
    """

    recording: Recording
    is_training: bool
    open: list[str] = field(default_factory=list)

    def record(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function` on the device's tensors and record it as one operation.

        Args:
            function: The function that the device runs. It also runs while tracing.
            *args: Positional arguments, at least one tensor among them.
            **kwargs: Keyword arguments.

        Returns:
            Its result; the tensors in it are on the device.

        Raises:
            Error: One of the tensors is the host's.
        """
        self.require_device(function.__name__, tensors_in((args, kwargs)))
        return DeviceFunction(function)(*args, **kwargs)

    def require_device(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Refuse tensors of the host.

        Raises:
            Error: There is one; the message names `what` takes it.
        """
        for tensor in tensors:
            if not self.recording.is_on_device(tensor):
                raise host_tensor_among(what, tensor)

    def refuse_training(self, what: str) -> None:
        """Refuse a function that no device differentiates.

        Raises:
            Error: The trace is for training.
        """
        if self.is_training:
            raise createPoptorchError(
                f"poptorch.{what}() is only supported in inference: the device has "
                "no backward pass for it."
            )

    @contextlib.contextmanager
    def inside(self, construct: str) -> Iterator[None]:
        """Keep `construct` open for a while."""
        self.open.append(construct)
        try:
            yield
        finally:
            self.open.pop()


_active: Trace | None = None


def is_tracing() -> bool:
    """Whether a module is being traced at this moment.

    Example:
        >>> is_tracing()
        False
    """
    return _active is not None


def enclosing_trace() -> Trace | None:
    """The trace that the caller is in, also while a recorded operation runs.

    Example:
        >>> enclosing_trace() is None
        True
    """
    return _active


def current_trace() -> Trace | None:
    """The trace that would record an operation made here.

    Returns:
        None outside a trace, and while a recorded operation runs: what happens in
        there is part of it.

    Example:
        >>> current_trace() is None
        True
    """
    if _active is None or _active.recording.is_running_operation:
        return None
    return _active


@contextlib.contextmanager
def tracing(recording: Recording, *, is_training: bool) -> Iterator[Trace]:
    """Make a trace the current one for a while."""
    global _active
    before = _active
    _active = Trace(recording, is_training)
    try:
        yield _active
    finally:
        _active = before


def require_tensor(value: Any, message: str) -> None:
    """Refuse what is no tensor, as PopTorch's functions do.

    Args:
        value: The argument of PopTorch's function.
        message: The beginning of the error's message, which says what it takes.

    Raises:
        Error: `value` isn't a tensor.

    Example:
        >>> require_tensor(3, "f takes a tensor.")
        Traceback (most recent call last):
            ...
        ipufit.emulator.errors.Error: 'poptorch_py_error': f takes a tensor. Got int.
    """
    if not isinstance(value, Tensor):
        raise createPoptorchError(f"{message} Got {type(value).__name__}.")


def getIpuTensorId(x: Tensor) -> int:
    """The number of a tensor that is on the device, while a model is traced.

    The numbers are the emulator's own: each trace counts its tensors from 0, in the
    order in which it meets them, weights and inputs first.

    Args:
        x: A weight, an input, or a result of them.

    Returns:
        The number; a tensor keeps it when it is changed in place.

    Raises:
        Error: `x` isn't a tensor of the device; outside `forward` none is.

    Example:
        >>> import torch
        >>> from ipufit.emulator import inferenceModel
        >>> class Curious(torch.nn.Module):
        ...     def forward(self, x):
        ...         y = x + 1
        ...         print(getIpuTensorId(x), getIpuTensorId(y))
        ...         return y
        >>> inferenceModel(Curious()).compile(torch.ones(1))
        0 1
    """
    require_tensor(x, "getIpuTensorId takes a tensor.")
    trace = enclosing_trace()
    if trace is None or not trace.recording.is_on_device(x):
        raise createPoptorchError(
            "Only tensors on the IPU have an id: the weights and inputs of a model and "
            "what `forward` computes from them, while it is traced."
        )
    numbers = [id(tensor) for tensor in trace.recording.tensors()]
    return numbers.index(id(x))


_Hooks = Dict[int, Callable[[], Any]]

_before: _Hooks = OrderedDict()
_after: _Hooks = OrderedDict()


def registerPreCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Have `hook` called whenever an executor begins to trace its model.

    It is called by every executor, without arguments, in the order of registration.
    As in PopTorch the trace is under way then: torch calls in a hook become part of
    the program, and `isRunningOnIpu()` is true.

    Returns:
        A handle with `remove()`.

    Raises:
        RuntimeError: `hook` can't be called.

    Example:
        >>> import torch
        >>> from ipufit.emulator import inferenceModel
        >>> handle = registerPreCompileHook(lambda: print("compiling"))
        >>> inferenceModel(torch.nn.Identity()).compile(torch.ones(1))
        compiling
        >>> handle.remove()
        >>> inferenceModel(torch.nn.Identity()).compile(torch.ones(1))
    """
    return _register(_before, hook, "Pre-compile")


def registerPostCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Have `hook` called whenever an executor has traced its model.

    It is called by every executor, without arguments, in the order of registration:
    after the trace, even one that failed, and before what compiling refuses is
    refused.

    Returns:
        A handle with `remove()`.

    Raises:
        RuntimeError: `hook` can't be called.

    Example:
        >>> import torch
        >>> from ipufit.emulator import inferenceModel
        >>> handle = registerPostCompileHook(lambda: print("traced"))
        >>> inferenceModel(torch.nn.Identity()).compile(torch.ones(1))
        traced
        >>> handle.remove()
    """
    return _register(_after, hook, "Post-compile")


def call_pre_compile_hooks() -> None:
    """Call the hooks of `registerPreCompileHook`."""
    _call(_before)


@contextlib.contextmanager
def post_compile_hooks() -> Iterator[None]:
    """Call the hooks of `registerPostCompileHook` at the end, also after an error."""
    try:
        yield
    finally:
        _call(_after)


def _register(hooks: _Hooks, hook: Callable[[], Any], kind: str) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"{kind} hook must be callable. Got {hook!r}.")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _call(hooks: _Hooks) -> None:
    for hook in list(hooks.values()):
        hook()
