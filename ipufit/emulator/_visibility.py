# SPDX-License-Identifier: Apache-2.0
"""Calls that a `TorchFunctionMode` would miss: shown to it, or refused."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from ._operands import tensors_in
from ._refusals import untraceable
from .errors import Error

_INDEXING = ("__getitem__", "__setitem__")
_INDEXING_ESCAPES = torch.__version__.startswith("2.0.")


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
                return handle_torch_function(original, (self,), self, *index)
            return original(self, *index)

        return access

    for name in _INDEXING:
        setattr(Tensor, name, shown(getattr(Tensor, name)))
    try:
        yield
    finally:
        for name in _INDEXING:
            delattr(Tensor, name)  # the inherited one is back


class EscapeGuard(TorchDispatchMode):
    """Refuses operators that touch the device's tensors without being traced.

    TorchScript and the transforms of `torch.func` call operators directly. Without
    the guard their results would be frozen into the program, silently. What it
    refused it raises on leaving too, as TorchScript turns errors into its own.

    Args:
        is_expected: Whether the trace is carrying out a call that it has seen.
        is_on_device: Whether a tensor belongs to the traced program.
    """

    def __init__(
        self, is_expected: Callable[[], bool], is_on_device: Callable[[Tensor], bool]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._is_expected = is_expected
        self._is_on_device = is_on_device
        self._refusal: Error | None = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Let `func` pass, or refuse it."""
        kwargs = kwargs or {}
        if not self._is_expected() and any(
            self._is_on_device(tensor) for tensor in tensors_in((args, kwargs))
        ):
            self._refusal = untraceable(func)
            raise self._refusal
        return func(*args, **kwargs)

    def __exit__(self, *exception: Any) -> None:
        """Stop watching."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call,unused-ignore]
        if self._refusal is not None:
            raise self._refusal
