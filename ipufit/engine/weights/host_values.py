# SPDX-License-Identifier: Apache-2.0
"""0-d buffers, whose values are the host's: they go to the device with every call.

A value that changes while a model trains, such as the weight of a loss that is
annealed, can't be a number of the module: numbers are baked in. A buffer isn't, but it
stays on the device as weights do. So a program gets 0-d buffers as inputs. They cost
nothing beside a batch, and a change counts from the next call on.
"""

from __future__ import annotations

import contextlib
from typing import Collection, Iterable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

from .wide import check_integers

_COUNTERS = (torch.nn.modules.batchnorm._NormBase,)
"""Modules with a 0-d buffer that they change themselves when they are trained."""


class HostValue(NamedTuple):
    """A 0-d buffer that only the host changes."""

    owner: torch.nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        """The buffer as it is now."""
        return self.owner._buffers[self.name]  # type: ignore[return-value]


class MovedOnDeviceError(Exception):
    """`forward` itself changes 0-d buffers, so these have to stay on the device."""

    def __init__(self, moved: list[HostValue]) -> None:
        super().__init__("0-d buffers are changed by forward")
        self.moved = moved


def host_values_of(
    modules: Iterable[torch.nn.Module], moved: Collection[HostValue] = ()
) -> list[HostValue]:
    """Find the 0-d buffers that only the host changes.

    Args:
        modules: The user's module, and losses.
        moved: Buffers that `forward` changes.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> module.register_buffer("beta", torch.tensor(0.5))
        >>> [value.name for value in host_values_of([module])]
        ['beta']
    """
    found: dict[HostValue, None] = {}
    for owner in (part for module in modules for part in module.modules()):
        buffers = vars(owner).get("_buffers")
        if isinstance(owner, _COUNTERS) or not isinstance(buffers, dict):
            continue
        for name, buffer in buffers.items():
            if isinstance(buffer, Tensor) and buffer.dim() == 0:
                found[HostValue(owner, name)] = None
    return [value for value in found if value not in moved]


def host_tensors(values: Iterable[HostValue], num_micro_batches: int) -> list[Tensor]:
    """Make inputs of a call from the host's values, of shape `[micro-batches]` each.

    Args:
        values: Buffers to take the values of.
        num_micro_batches: Micro-batches of a call, over all replicas.

    Raises:
        UnsupportedError: A buffer has an integer that 32 bits can't hold.

    Example:
        >>> module = torch.nn.Module()
        >>> module.register_buffer("beta", torch.tensor(0.5))
        >>> host_tensors([HostValue(module, "beta")], 2)
        [tensor([0.5000, 0.5000])]
    """
    tensors = [(value.name, value.tensor) for value in values]
    for name, tensor in tensors:
        check_integers(name, tensor)
    return [
        tensor.detach().reshape(1).repeat(num_micro_batches) for _, tensor in tensors
    ]


@contextlib.contextmanager
def replaced_by_inputs(
    values: Sequence[HostValue], inputs: Sequence[Tensor]
) -> Iterator[None]:
    """Have buffers be the inputs of a program, while it is traced.

    Args:
        values: Buffers to replace.
        inputs: One tensor for each, `[1]`: the value in one micro-batch.

    Raises:
        MovedOnDeviceError: The traced code has changed some of them.
    """
    before = [value.tensor for value in values]
    given = [tensor.reshape(()) for tensor in inputs]
    versions = [tensor._version for tensor in given]
    for value, tensor in zip(values, given):
        value.owner._buffers[value.name] = tensor
    moved: list[HostValue] = []
    try:
        yield
        moved = [
            value
            for value, tensor, version in zip(values, given, versions)
            if value.tensor is not tensor or tensor._version != version
        ]
    finally:
        for value, buffer in zip(values, before):
            value.owner._buffers[value.name] = buffer
    if moved:
        raise MovedOnDeviceError(moved)
