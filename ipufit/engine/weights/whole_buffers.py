# SPDX-License-Identifier: Apache-2.0
"""Buffers of whole numbers: PopTorch compiles them in as constants.

What `forward` writes to one is gone with the micro-batch (PopTorch's
`JitDispatch::addParameter`): the next one begins with the constant again. Counters that
nothing computes with, as batch norm's `num_batches_tracked`, are counted here, on the
host. What else is written is said, and what is computed with is refused.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable, Iterable, Mapping, MutableMapping

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ipufit._poptorch import poptorch
from ipufit.errors import ConstantBuffersWarning, UnsupportedError

from .operands import short, tensors_of

_ADDITIONS = ("add_", "__iadd__")
_NO_VALUES = ("__get__", "dim", "size", "numel", "stride", "__len__", "__repr__")
"""Functions that need no values of their tensors."""


class BufferWatch(TorchFunctionMode):
    """Notes what a trace does to buffers of whole numbers.

    Args:
        buffers: All that there are, by name, as they are in the trace.

    Attributes:
        problem: What was refused: an operator of Python's may have hidden the error.

    Example:
        >>> count = torch.tensor(0)
        >>> with BufferWatch({"count": count}) as watch:
        ...     _ = count.add_(1)
        >>> watch.increments()
        {'count': 1}
    """

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._buffers = {n: b for n, b in buffers.items() if _is_whole(b)}
        self._name_of = {id(b): name for name, b in self._buffers.items()}
        self._views: list[Tensor] = []  # kept, as ids are
        self._added: dict[str, int] = {}
        self._written: dict[str, None] = {}
        self._used: set[str] = set()
        self.problem: UnsupportedError | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, and note what it does to the buffers among its arguments."""
        kwargs = kwargs or {}
        given = {id(t): t for t in tensors_of((args, kwargs)) if id(t) in self._name_of}
        name = getattr(func, "__name__", "")
        if not given or name in _NO_VALUES:
            return func(*args, **kwargs)
        before = {key: tensor._version for key, tensor in given.items()}
        try:
            result = func(*args, **kwargs)
        except poptorch.Error:  # such as of `float(buffer)`
            self._used.update(self._name_of[key] for key in given)
            self._refuse_used()
            raise
        for key, tensor in given.items():
            buffer = self._name_of[key]
            if tensor._version != before[key]:
                self._note_write(buffer, name, args)
            elif isinstance(result, Tensor) and result._base is not None:
                self._views.append(result)
                self._name_of[id(result)] = buffer
            else:
                self._used.add(buffer)
        self._refuse_used()
        return result

    def _refuse_used(self) -> None:
        for buffer in self._used & self._written.keys():
            self._refuse(buffer)

    def _note_write(self, buffer: str, name: str, args: tuple[Any, ...]) -> None:
        self._written[buffer] = None
        is_counted = (
            name in _ADDITIONS
            and args[0] is self._buffers[buffer]
            and type(args[1]) is int
        )
        if is_counted and self._added.get(buffer) != 0:
            self._added[buffer] = self._added.get(buffer, 0) + args[1]
        else:
            self._added[buffer] = 0  # no counter

    def _refuse(self, buffer: str) -> None:
        self.problem = UnsupportedError(
            f"forward changes the buffer {short(buffer)!r} and computes with it, but "
            "PopTorch compiles buffers of whole numbers in as constants: every "
            "micro-batch would begin with the same value. Keep the number in a float32 "
            "buffer, which lives on the device (for batch norm, set a momentum instead "
            "of momentum=None)."
        )
        raise self.problem

    def refuse_returned(self, tensors: Iterable[Tensor]) -> None:
        """Refuse to return buffers that were changed.

        Args:
            tensors: What the module returns.

        Raises:
            UnsupportedError: One of them is such a buffer.
        """
        for tensor in tensors:
            buffer = self._name_of.get(id(tensor))
            if buffer in self._written:
                self._refuse(str(buffer))

    def increments(self) -> dict[str, int]:
        """By how much a micro-batch counts up each buffer that only counts."""
        return {name: number for name, number in self._added.items() if number}

    def warn(self, *, is_counted: bool) -> None:
        """Say which buffers are written to in vain.

        Args:
            is_counted: Whether the host counts those that only count.

        Warns:
            ConstantBuffersWarning: There are such.
        """
        counted = self.increments() if is_counted else {}
        lost = [short(name) for name in self._written if name not in counted]
        if lost:
            warnings.warn(
                f"forward changes {', '.join(lost)}: PopTorch compiles buffers of "
                "whole numbers in as constants, so they stay as they are on the host, "
                "and evaluate() and predict() see no change. Use float32 buffers for "
                "what is to change.",
                ConstantBuffersWarning,
                stacklevel=2,
            )


_COUNTED: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call,unused-ignore]


def is_counted(buffer: Tensor) -> bool:
    """Whether the host counts a buffer up, so that it changes by itself.

    Example:
        >>> is_counted(torch.tensor(0))
        False
    """
    return buffer in _COUNTED


class Counters:
    """The buffers of a module that the host counts up for the device.

    Args:
        module: Has the buffers.
        increments: For each micro-batch, by the buffers' names.
        micro_batches: That one replica sees in a call.

    Example:
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> Counters(norm, {"num_batches_tracked": 1}, 8).count_call()
        >>> norm.num_batches_tracked
        tensor(8)
    """

    def __init__(
        self,
        module: torch.nn.Module,
        increments: Mapping[str, int],
        micro_batches: int,
    ) -> None:
        buffers = dict(module.named_buffers())
        self._increments = [
            (buffers[name], number * micro_batches)
            for name, number in increments.items()
        ]
        _COUNTED.update((buffer, True) for buffer, _ in self._increments)

    def count_call(self) -> None:
        """Count what a replica has seen; nothing is fetched from the device for it."""
        if self._increments:
            with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
                for buffer, number in self._increments:
                    Tensor.add_(buffer, number)


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
