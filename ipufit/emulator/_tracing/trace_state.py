# SPDX-License-Identifier: Apache-2.0
"""Which trace is under way, for the functions that a module calls in `forward`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator

from torch import Tensor
from torch.overrides import handle_torch_function

from ipufit.emulator._tracing.operands import tensors_in
from ipufit.emulator._tracing.refusals import host_tensor_among
from ipufit.emulator.errors import createPoptorchError

if TYPE_CHECKING:
    from ipufit.emulator._tracing.tracer import Tracer


class RecordedCall:
    """A function of the emulator's that is one call to modes of torch's functions.

    A mode of the user's calls what it is told of: that goes on to the next mode, and
    so to the tracer, as torch's own functions do.

    Args:
        function: What the tracer records.

    Attributes:
        function: The same.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Tell the next mode."""
        tensors = tuple(tensors_in((args, kwargs)))
        return handle_torch_function(self, tensors, *args, **kwargs)


def recorded(func: Callable[..., Any]) -> Callable[..., Any]:
    """What a tracer records of `func`."""
    return func.function if isinstance(func, RecordedCall) else func


@dataclass
class TraceState:
    """A trace under way.

    Attributes:
        tracer: It records the calls.
        is_training: Whether the program will be differentiated.
        open: Names of the constructs that are not finished, innermost last.
    """

    tracer: Tracer
    is_training: bool
    open: list[str] = field(default_factory=list)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Carry out `function` on the device's tensors and record it as one call.

        Args:
            function: What the device runs. It is called while tracing too.
            *args: At least one tensor among them.
            **kwargs: The same by name.

        Returns:
            Its result, with the tensors that stand for the device's.

        Raises:
            Error: One of the tensors is the host's.
        """
        self.require_device(function.__name__, tensors_in((args, kwargs)))
        return RecordedCall(function)(*args, **kwargs)

    def require_device(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Refuse tensors of the host.

        Raises:
            Error: There is one; `what` says who needs it on the device.
        """
        for tensor in tensors:
            if not self.tracer.is_on_device(tensor):
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


_active: TraceState | None = None


def is_tracing() -> bool:
    """Whether a module is being traced at this moment.

    Example:
        >>> is_tracing()
        False
    """
    return _active is not None


def active_state() -> TraceState | None:
    """The trace under way, wherever in it the caller is.

    Example:
        >>> active_state() is None
        True
    """
    return _active


def current_trace() -> TraceState | None:
    """The trace that a call at this place would be recorded by.

    Returns:
        None outside a trace, and while a recorded call is carried out: what happens
        in there is part of that call.

    Example:
        >>> current_trace() is None
        True
    """
    if _active is None or _active.tracer.is_recording():
        return None
    return _active


@contextlib.contextmanager
def active_trace(tracer: Tracer, *, is_training: bool) -> Iterator[TraceState]:
    """Make a trace the current one for a while.

    Args:
        tracer: It records the calls.
        is_training: Whether the program will be differentiated.

    Yields:
        The state of the trace.
    """
    global _active
    before = _active
    _active = TraceState(tracer, is_training)
    try:
        yield _active
    finally:
        _active = before


def require_tensor(value: Any, message: str) -> None:
    """Refuse what is no tensor, as PopTorch's functions do.

    Args:
        value: The argument.
        message: What the function takes.

    Raises:
        Error: It isn't a tensor.

    Example:
        >>> require_tensor(3, "f takes a tensor.")
        Traceback (most recent call last):
            ...
        ipufit.emulator.errors.Error: 'poptorch_py_error': f takes a tensor. Got int.
    """
    if not isinstance(value, Tensor):
        raise createPoptorchError(f"{message} Got {type(value).__name__}.")
