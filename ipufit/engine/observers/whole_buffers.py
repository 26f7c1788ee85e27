# SPDX-License-Identifier: Apache-2.0
"""Buffers of whole numbers that traced code changes.

PopTorch compiles them in as constants, so what `forward` writes to one is gone with the
micro-batch (PopTorch's `JitDispatch::addParameter`): the next one begins with the
constant again. Counters that nothing computes with are counted on the host. Of other
writes there is a warning, and computing with what was written is refused.
"""

from __future__ import annotations

import warnings
from typing import Any, Iterable, Mapping

from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.engine.weights.names import user_name
from ipufit.errors import ConstantBuffersWarning, UnsupportedError

from .observing import Observer, Operation

_ADDITIONS = ("add_", "__iadd__")
_NO_VALUES = ("__get__", "dim", "size", "numel", "stride", "__len__", "__repr__")
"""Functions that need no values of their tensors."""


class BufferObserver(Observer):
    """Notes what a trace does to buffers of whole numbers.

    Args:
        buffers: All buffers by name, as they are in the trace.

    Example:
        >>> import torch
        >>> from ipufit.engine.observers.observing import Observing
        >>> count = torch.tensor(0)
        >>> buffers = BufferObserver({"count": count})
        >>> with Observing(buffers):
        ...     _ = count.add_(1)
        >>> buffers.increments()
        {'count': 1}
    """

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self._buffers = {name: b for name, b in buffers.items() if _is_whole(b)}
        self._name_of = {id(buffer): name for name, buffer in self._buffers.items()}
        self._views: list[Tensor] = []  # kept alive: their ids are in _name_of
        self._operands: list[tuple[Tensor, int]] = []
        self._added: dict[str, int] = {}
        self._written: dict[str, None] = {}
        self._used: set[str] = set()

    def before(self, operation: Operation) -> None:
        """Note the versions of the buffers that an operation gets."""
        self._operands = (
            []
            if operation.name in _NO_VALUES
            else [
                (tensor, tensor._version)
                for tensor in operation.tensors
                if id(tensor) in self._name_of
            ]
        )

    def after(self, operation: Operation, result: Any) -> Any:
        """Note whether an operation has written to buffers, viewed or used them."""
        for tensor, version in self._operands:
            buffer = self._name_of[id(tensor)]
            if tensor._version != version:
                self._note_write(buffer, operation)
            elif isinstance(result, Tensor) and result._base is not None:
                self._views.append(result)
                self._name_of[id(result)] = buffer
            else:
                self._used.add(buffer)
        if self._operands:
            self._refuse(self._used & self._written.keys())
        return result

    def failed(self, operation: Operation, error: Exception) -> None:
        """Note that an operation that PopTorch refuses, as `float(buffer)`, uses it."""
        if isinstance(error, poptorch.Error) and self._operands:
            self._used.update(self._name_of[id(tensor)] for tensor, _ in self._operands)
            self._refuse(self._used & self._written.keys())

    def _note_write(self, buffer: str, operation: Operation) -> None:
        self._written[buffer] = None
        args = operation.args
        is_counted = (
            operation.name in _ADDITIONS
            and args[0] is self._buffers[buffer]
            and type(args[1]) is int
        )
        if is_counted and self._added.get(buffer) != 0:
            self._added[buffer] = self._added.get(buffer, 0) + args[1]
        else:
            self._added[buffer] = 0  # no counter

    def refuse_returned(self, tensors: Iterable[Tensor]) -> None:
        """Refuse to return buffers that were changed.

        Args:
            tensors: Everything that the module returns.

        Raises:
            UnsupportedError: One of them is such a buffer.
        """
        returned = {self._name_of.get(id(tensor), "") for tensor in tensors}
        self._refuse(returned & self._written.keys())

    @staticmethod
    def _refuse(buffers: set[str]) -> None:
        if buffers:
            name = user_name(min(buffers))
            raise UnsupportedError(
                f"forward changes the buffer {name!r} and computes with it, but "
                "PopTorch compiles buffers of whole numbers in as constants: every "
                "micro-batch would begin with the same value. Keep the number in a "
                "float32 buffer, which lives on the device (for batch norm, set a "
                "momentum instead of momentum=None)."
            )

    def increments(self) -> dict[str, int]:
        """The number that a micro-batch adds to each buffer that is only counted up."""
        return {name: number for name, number in self._added.items() if number}

    def warn(self, *, is_counted: bool) -> None:
        """Warn of buffers that are written to in vain.

        Args:
            is_counted: Whether the host counts those up that are only counted up.

        Warns:
            ConstantBuffersWarning: There are such buffers.
        """
        counted = self.increments() if is_counted else {}
        lost = [user_name(name) for name in self._written if name not in counted]
        if lost:
            warnings.warn(
                f"forward changes {', '.join(lost)}: PopTorch compiles buffers of "
                "whole numbers in as constants, so they stay as they are on the host, "
                "and evaluate() and predict() see no change. Use float32 buffers for "
                "what is to change.",
                ConstantBuffersWarning,
                stacklevel=2,
            )


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
