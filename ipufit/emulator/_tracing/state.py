# SPDX-License-Identifier: Apache-2.0
"""The current trace, for functions that a module calls in `forward`."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ipufit.emulator.errors import createPoptorchError

if TYPE_CHECKING:  # at run time only models that are compiled need it
    from ipufit.emulator._tracing.recording import Recording


_active: Recording | None = None


def is_tracing() -> bool:
    """Return whether a module is being traced at this moment.

    Example:
        >>> is_tracing()
        False
    """
    return _active is not None


def enclosing_trace() -> Recording | None:
    """Return the current trace, also while a recorded operation runs.

    Example:
        >>> enclosing_trace() is None
        True
    """
    return _active


def current_trace() -> Recording | None:
    """Return the trace that would record an operation made now.

    Returns:
        None outside a trace, and while a recorded operation runs: calls inside it
        are part of it.

    Example:
        >>> current_trace() is None
        True
    """
    if _active is None or _active.is_running_operation:
        return None
    return _active


@contextlib.contextmanager
def tracing(recording: Recording) -> Iterator[None]:
    """Make a trace the current one inside the context."""
    global _active
    before = _active
    _active = recording
    try:
        yield
    finally:
        _active = before


def require_tensor(value: Any, message: str) -> None:
    """Refuse an argument that isn't a tensor, as PopTorch's functions do.

    Args:
        value: The argument of PopTorch's function.
        message: Beginning of the error message, about the arguments that the function
            takes.

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
    """Return the number of a device's tensor, while a model is traced.

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
    if trace is None or not trace.is_on_device(x):
        raise createPoptorchError(
            "Only tensors on the IPU have an id: the weights and inputs of a model and "
            "what `forward` computes from them, while it is traced."
        )
    numbers = [id(tensor) for tensor in trace.tensors()]
    return numbers.index(id(x))


_Hooks = Dict[int, Callable[[], Any]]

_before: _Hooks = OrderedDict()
_after: _Hooks = OrderedDict()


def registerPreCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Register a function to call whenever an executor begins to trace its model.

    It is called by every executor, without arguments, in the order of registration.
    As in PopTorch the trace has begun then: torch calls in a hook become part of
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
    """Register a function to call whenever an executor has traced its model.

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
    for hook in list(_before.values()):
        hook()


@contextlib.contextmanager
def post_compile_hooks() -> Iterator[None]:
    """Call the hooks of `registerPostCompileHook` after the context, even on errors."""
    try:
        yield
    finally:
        for hook in list(_after.values()):
            hook()


def _register(hooks: _Hooks, hook: Callable[[], Any], kind: str) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"{kind} hook must be callable. Got {hook!r}.")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
