# SPDX-License-Identifier: Apache-2.0
"""Show the tracer calls that a `TorchFunctionMode` would miss, or refuse them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any, Callable, Iterator

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ipufit.emulator._ground.without_compiler import DispatchMode
from ipufit.emulator._tracing.operands import tensors_in
from ipufit.emulator._tracing.recording import Recording
from ipufit.emulator._tracing.refusals import untraceable
from ipufit.emulator.errors import Error

_INDEXING_ESCAPES = torch.__version__.startswith("2.0.")

_POINTER = ctypes.sizeof(ctypes.c_void_p)
_AS_SEQUENCE = 13
"""Position of `tp_as_sequence` in CPython's `PyTypeObject`, in pointers."""
_INDEXING = {"__getitem__": 3, "__setitem__": 5}
"""Position of these methods in `PySequenceMethods`."""


@contextlib.contextmanager
def visible_indexing() -> Iterator[None]:
    """Make `tensor[i]` visible: torch 2.0 shows most kinds of index to no mode."""
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
    """A place where CPython keeps a method that makes instances of `cls` sequences.

    Setting `__getitem__` fills one, deleting `__getitem__` doesn't empty it again, and
    then `torch.tensor([torch.tensor(1)])` takes the inner tensor for a sequence.
    """
    table = ctypes.c_void_p.from_address(id(cls) + _AS_SEQUENCE * _POINTER).value
    return ctypes.c_void_p.from_address((table or 0) + position * _POINTER)


class EscapeGuard(DispatchMode):
    """Refuses operators that touch the device's tensors without being traced.

    TorchScript and the transforms of `torch.func` call operators directly. Without
    the guard their results would be frozen into the program, silently. It raises its
    refusal again on leaving, as TorchScript turns errors into its own.

    Args:
        recording: Recording of the trace to guard.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._recording = recording
        self._refusal: Error | None = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, or refuse it."""
        kwargs = kwargs or {}
        if not self._recording.is_running_operation and any(
            map(self._recording.is_on_device, tensors_in((args, kwargs)))
        ):
            self._refusal = untraceable(func)
            raise self._refusal
        return func(*args, **kwargs)

    def __exit__(self, *exception: Any) -> None:
        """Leave the mode, and raise what was refused."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call,unused-ignore]
        if self._refusal is not None:
            raise self._refusal
