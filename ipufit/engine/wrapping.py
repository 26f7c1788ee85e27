# SPDX-License-Identifier: Apache-2.0
"""The classes that PopTorch gives to the weights of a module that is trained.

They fetch the newest values from the device when somebody reads a weight. PopTorch
remembers them after `destroy()` and brings them back with its next compilation, those
of a program that is gone too. And a buffer that has one can't be copied deeply. So a
weight of ours has such a class only while the device's value is newer.
"""

from __future__ import annotations

import copy
from typing import Any, Iterable, MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_PLAIN: MutableMapping[Tensor, type[Tensor]] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call,unused-ignore]
"""The class that each weight had before PopTorch saw it."""


def weights_of(module: torch.nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once.

    Example:
        >>> len(weights_of(torch.nn.BatchNorm1d(2)))
        5
    """
    return [*module.parameters(), *module.buffers()]


def remember_classes(weights: Iterable[Tensor]) -> None:
    """Note the classes of weights before they are wrapped for the first time."""
    for weight in weights:
        if weight not in _PLAIN:
            _PLAIN[weight] = type(weight)


def make_plain(weights: Iterable[Tensor]) -> None:
    """Give weights the classes that they had before they were wrapped."""
    for weight in weights:
        weight.__class__ = _PLAIN.get(weight, type(weight))


class Wrappers:
    """The classes of the weights of one training program.

    Args:
        weights: As PopTorch has just wrapped them.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._classes = [(weight, type(weight)) for weight in weights]
        for weight, wrapper in self._classes:
            if wrapper is not _PLAIN[weight]:
                wrapper.__deepcopy__ = _deep_copy  # type: ignore[method-assign]

    def put_on(self) -> None:
        """Have the weights fetch themselves from the device when they are read."""
        for weight, wrapper in self._classes:
            weight.__class__ = wrapper


def _deep_copy(weight: Tensor, memo: dict[int, Any]) -> Any:
    """A plain copy of a wrapped weight; looking the method up has fetched its value."""
    wrapper = type(weight)
    make_plain([weight])
    try:
        return copy.deepcopy(weight, memo)
    finally:
        weight.__class__ = wrapper
