# SPDX-License-Identifier: Apache-2.0
"""Exchanges of values between processes; without cost for a single process."""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
from typing import Any, Iterator, Sequence, TypeVar

import torch
from torch import Tensor, distributed

from ipufit.errors import ProcessError

from .environment import ALONE, ProcessInfo
from .group import group_of

T = TypeVar("T")

_FIRST = 0
_SMALL = 2**20  # bytes

_recent: deque[Tensor] = deque(maxlen=64)
"""Small tensors that were exchanged last.

A thread of gloo lets go of a tensor some time after the exchange is done. If nobody
else has it any more, the thread frees it, for which it needs the interpreter's lock;
and torch 2.0 waits for the thread with that lock when it ends a group.
"""

_is_off = False


@contextlib.contextmanager
def exchanges_off() -> Iterator[None]:
    """Let every exchange inside the context fail at once.

    A process whose run has failed is no longer at the same place as the others: they
    would mistake what it sends.

    Example:
        >>> with exchanges_off():
        ...     Processes(ProcessInfo(0, 2)).barrier()
        Traceback (most recent call last):
        ipufit.errors.ProcessError: The run of process 0 of 2 has failed or was ...
    """
    global _is_off
    before, _is_off = _is_off, True
    try:
        yield
    finally:
        _is_off = before


class Processes:
    """The processes of a run, for exchanges with the others.

    Every process must call the same methods in the same order. With a single process
    each method returns at once, and no process group is made.

    Args:
        info: This process.

    Raises:
        ProcessError: From every method, if another process has ended or doesn't come.

    Example:
        >>> alone = Processes()
        >>> alone.summed(torch.tensor([1.0, 2.0])), alone.gathered("a")
        (tensor([1., 2.]), ['a'])
    """

    def __init__(self, info: ProcessInfo = ALONE) -> None:
        self.info = info

    @property
    def index(self) -> int:
        """Index of this process, from 0."""
        return self.info.index

    @property
    def count(self) -> int:
        """Number of processes."""
        return self.info.count

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which prints and writes files for all."""
        return self.info.is_first

    @property
    def are_several(self) -> bool:
        """Whether there is more than one process."""
        return self.info.count > 1

    def summed(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes of tensors of one shape and dtype."""
        if not self.are_several:
            return tensor
        total: Tensor = tensor.detach().clone()
        with self._exchange("a sum") as group:
            distributed.all_reduce(_kept(total), group=group)
        return total

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values of process 0 into tensors of all processes, in one message.

        Tensors are sent as bytes, because gloo doesn't know every dtype.
        """
        if not self.are_several or not tensors:
            return
        own = [_bytes_of_tensor(tensor) for tensor in tensors]
        joined = _kept(torch.cat(own))
        with self._exchange("tensors of process 0") as group:
            distributed.broadcast(joined, _FIRST, group=group)
        if self.is_first:
            return
        parts: Any = torch.split(joined, [len(part) for part in own])
        for tensor, part in zip(tensors, parts):
            # A copy: a part of the message may begin anywhere, a number may not.
            tensor.detach().copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    def first(self, value: T) -> T:
        """Return the value of process 0; the values of other processes are ignored.

        Args:
            value: Anything that can be pickled.
        """
        if not self.are_several:
            return value
        content = _bytes_of(value) if self.is_first else _no_bytes(0)
        size = _kept(torch.tensor([content.numel()]))
        with self._exchange("a value of process 0") as group:
            distributed.broadcast(size, _FIRST, group=group)
            if not self.is_first:
                content = _no_bytes(int(size))
            distributed.broadcast(content, _FIRST, group=group)
        return value if self.is_first else _value_of(content)

    def gathered(self, value: T) -> list[T]:
        """Return the values of all processes, in their order.

        Args:
            value: Anything that can be pickled.
        """
        if not self.are_several:
            return [value]
        own = _bytes_of(value)
        size = _kept(torch.tensor([own.numel()]))
        sizes = [_kept(torch.empty_like(size)) for _ in range(self.count)]
        with self._exchange("values of all processes") as group:
            distributed.all_gather(sizes, size, group=group)
            lengths = [int(one) for one in sizes]
            padded = _no_bytes(max(lengths))
            padded[: own.numel()] = own
            contents = [_no_bytes(max(lengths)) for _ in lengths]
            distributed.all_gather(contents, padded, group=group)
        return [_value_of(one[:n]) for one, n in zip(contents, lengths)]

    def barrier(self) -> None:
        """Wait until all processes call this."""
        self.summed(torch.zeros(1))

    @contextlib.contextmanager
    def _exchange(self, what: str) -> Iterator[Any]:
        if _is_off:
            raise ProcessError(
                f"The run of process {self.index} of {self.count} has failed or was "
                f"interrupted: it doesn't wait for {what}, because others are "
                "elsewhere. Nothing can be saved by all processes now."
            )
        group = group_of(self.info)
        try:
            yield group
        except RuntimeError as error:
            raise ProcessError(
                f"Process {self.index} of {self.count} waited for {what}, and another "
                "process has ended, or didn't come in time. If one has failed, its own "
                "error is the first of the output. All processes must call the same "
                "methods of a model (no `if` on the number of the process around "
                "fit, evaluate or predict); IPUFIT_PROCESS_TIMEOUT sets how many "
                f"seconds they wait. ({_first_line(error)})"
            ) from error


def _bytes_of_tensor(tensor: Tensor) -> Tensor:
    plain: Any = tensor.detach().contiguous().reshape(-1)
    content: Tensor = plain.view(torch.uint8)
    return content


def _kept(tensor: Tensor) -> Any:
    """Return the tensor, and keep a reference for a while if it is small."""
    if tensor.numel() * tensor.element_size() <= _SMALL:
        _recent.append(tensor)
    return tensor


def _no_bytes(length: int) -> Tensor:
    empty: Tensor = _kept(torch.zeros(length, dtype=torch.uint8))
    return empty


def _bytes_of(value: Any) -> Tensor:
    content: Tensor = _kept(
        torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    )
    return content


def _value_of(content: Tensor) -> Any:
    return pickle.loads(content.numpy().tobytes())


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
