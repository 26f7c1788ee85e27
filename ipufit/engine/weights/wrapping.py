# SPDX-License-Identifier: Apache-2.0
"""Classes that PopTorch gives to the weights of a module that is trained.

They fetch the newest values from the device when somebody reads a weight. PopTorch
remembers them after `destroy()` and brings them back with its next compilation, those
of a program that is gone too. And a buffer that has one can't be copied deeply. So a
weight of ours has such a class only while the device's value is newer.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, Callable, Iterable, MutableMapping

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
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


_RAISED = object()


def unfetched(weight: Tensor, name: str, default: Any = _RAISED) -> Any:
    """An attribute of a weight, without fetching the weight from its device.

    Args:
        weight: Tensor on the host, of PopTorch's class or of its own.
        name: Name of the attribute.
        default: Value if there is no such attribute, instead of an error.

    Example:
        >>> unfetched(torch.zeros(2), "ndim")
        1
    """
    with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
        try:
            return object.__getattribute__(weight, name)
        except AttributeError:
            if default is _RAISED:
                raise
            return default


def remember_classes(weights: Iterable[Tensor]) -> None:
    """Remember the classes of weights before they are wrapped for the first time."""
    for weight in weights:
        if weight not in _PLAIN:
            _PLAIN[weight] = type(weight)


def plain_class(weight: Tensor) -> type[Tensor]:
    """The class that a weight had before PopTorch wrapped it, if it did.

    Example:
        >>> plain_class(torch.zeros(1))
        <class 'torch.Tensor'>
    """
    return _PLAIN.get(weight, type(weight))


def make_plain(weights: Iterable[Tensor]) -> None:
    """Give weights the classes that they had before they were wrapped."""
    for weight in weights:
        weight.__class__ = plain_class(weight)


class Wrappers:
    """The classes of the weights of one training program.

    While they are on, somebody who touches a weight gets the newest values, and may
    change them, which PopTorch doesn't notice. So a method of ours is called before.

    Args:
        weights: Weights that PopTorch has just wrapped.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._classes = [(weight, _PLAIN[weight], type(weight)) for weight in weights]
        self._on_touch: Callable[[], Callable[[], None] | None] = _nobody
        reference = weakref.ref(self)  # PopTorch keeps its classes for good
        for wrapper in {new for _, plain, new in self._classes if new is not plain}:
            _report_touches(wrapper, reference)

    def put_on(self, on_touch: Callable[[], None]) -> None:
        """Have the weights fetch themselves from the device when they are touched.

        Args:
            on_touch: A method to call before each touch.
        """
        self._on_touch = weakref.WeakMethod(on_touch)
        for weight, _, wrapper in self._classes:
            weight.__class__ = wrapper

    def take_off(self) -> None:
        """Make the weights plain; they keep the values that they have on the host."""
        for weight, plain, _ in self._classes:
            weight.__class__ = plain

    def touch(self) -> None:
        """Call the method for a weight that is about to be touched."""
        on_touch = self._on_touch()
        if on_touch is not None:
            on_touch()


def _nobody() -> None:
    return None


def _report_touches(wrapper: Any, reference: weakref.ReferenceType[Wrappers]) -> None:
    """Report touches of weights of a class before; copies and results are plain."""
    read, write = wrapper.__getattribute__, wrapper.__setattr__

    def touch() -> None:
        wrappers = reference()
        if wrappers is not None:
            wrappers.touch()

    def get(weight: Tensor, name: str) -> Any:
        touch()
        return read(weight, name)

    def put(weight: Tensor, name: str, value: Any) -> None:
        if name != "__class__":
            touch()
        write(weight, name, value)

    wrapper.__getattribute__, wrapper.__setattr__ = get, put
    wrapper.__torch_function__ = classmethod(_plain_result)
    wrapper.__deepcopy__ = _deep_copy


def _plain_result(
    cls: type[Tensor], func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """Call a function of torch with plain weights, so that state dicts can be saved."""
    with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
        return func(*args, **(kwargs or {}))


def _deep_copy(weight: Tensor, memo: dict[int, Any]) -> Any:
    """Copy a wrapped weight as a plain one; looking this up has fetched its value."""
    wrapper = type(weight)
    make_plain([weight])
    try:
        return copy.deepcopy(weight, memo)
    finally:
        weight.__class__ = wrapper
