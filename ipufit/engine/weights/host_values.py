# SPDX-License-Identifier: Apache-2.0
"""0-d buffers, whose values are the host's: they go to the device with every call.

A value that changes while a model trains, such as the weight of a loss that is
annealed, can't be a number of the module: numbers are baked in. A buffer isn't, but it
stays on the device as weights do. So a program gets 0-d buffers as inputs. They cost
nothing beside a batch, and a change counts from the next call on.
"""

from __future__ import annotations

import contextlib
from typing import Iterable, Iterator, Sequence, Tuple

import torch
from torch import Tensor

from .wide import check_integers

Place = Tuple[torch.nn.Module, str]
"""A module, and the name of a buffer of its own."""

_COUNTERS = (torch.nn.modules.batchnorm._NormBase,)
"""Modules with a 0-d buffer that they change themselves when they are trained."""


class MovedOnDeviceError(Exception):
    """`forward` itself changes 0-d buffers, so these have to stay on the device.

    Args:
        places: The module and the name of each of these buffers.
    """

    def __init__(self, places: list[Place]) -> None:
        super().__init__("0-d buffers are changed by forward")
        self.places = places


def host_values_of(
    modules: Iterable[torch.nn.Module], moved: Iterable[Place] = ()
) -> list[Place]:
    """The 0-d buffers that only the host changes.

    Args:
        modules: The user's module, and losses.
        moved: Buffers that `forward` changes.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> module.register_buffer("beta", torch.tensor(0.5))
        >>> [name for _, name in host_values_of([module])]
        ['beta']
    """
    changed = list(moved)
    places: list[Place] = []
    for module in modules:
        for owner in module.modules():
            buffers = vars(owner).get("_buffers")
            if isinstance(owner, _COUNTERS) or not isinstance(buffers, dict):
                continue
            for name, buffer in buffers.items():
                is_value = isinstance(buffer, Tensor) and buffer.dim() == 0
                place = owner, name
                if is_value and place not in changed and place not in places:
                    places.append(place)
    return places


def host_tensors(places: Iterable[Place], num_micro_batches: int) -> list[Tensor]:
    """The values as inputs of a call, `[micro-batches]` each.

    Args:
        places: Buffers, as they are now.
        num_micro_batches: In a call, over all replicas.

    Raises:
        UnsupportedError: One is an integer that 32 bits can't hold.

    Example:
        >>> module = torch.nn.Module()
        >>> module.register_buffer("beta", torch.tensor(0.5))
        >>> host_tensors([(module, "beta")], 2)
        [tensor([0.5000, 0.5000])]
    """
    values = [(name, owner._buffers[name]) for owner, name in places]
    for name, value in values:
        check_integers(name, value)  # type: ignore[arg-type]
    return [
        value.detach().reshape(1).repeat(num_micro_batches)  # type: ignore[union-attr]
        for _, value in values
    ]


@contextlib.contextmanager
def put_in(places: Sequence[Place], values: Sequence[Tensor]) -> Iterator[None]:
    """Have buffers be the inputs of a program, while it is traced.

    Args:
        places: Buffers.
        values: Of one micro-batch, `[1]` each.

    Raises:
        MovedOnDeviceError: What was traced has changed some.
    """
    before = [owner._buffers[name] for owner, name in places]
    given = [value.reshape(()) for value in values]
    versions = [value._version for value in given]
    for (owner, name), value in zip(places, given):
        owner._buffers[name] = value
    moved: list[Place] = []
    try:
        yield
        moved = [
            (owner, name)
            for (owner, name), value, version in zip(places, given, versions)
            if owner._buffers[name] is not value or value._version != version
        ]
    finally:
        for (owner, name), buffer in zip(places, before):
            owner._buffers[name] = buffer
    if moved:
        raise MovedOnDeviceError(moved)
