# SPDX-License-Identifier: Apache-2.0
"""Remembers the wrapper classes of modules and weights in training executors.

`trainingModel` gives the user's module, its parameters and its buffers wrapper classes.
Compiling and `destroy()` take them off, but they are remembered object by object, and
every compilation puts back what is remembered, even if the executor has been destroyed
since (PopTorch, `python/_impl.py`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from typing import Any, Callable, Iterable, Iterator

import torch

_PLAIN = "_poptorch_plain_class"

_remembered: dict[int, tuple[weakref.ReferenceType[Any], type[Any]]] = {}
"""The id of a living object -> the object, and its wrapper class."""


def is_wrapped(item: object) -> bool:
    """Whether a module, a parameter or a buffer has a wrapper class.

    Example:
        >>> from ipufit.emulator import trainingModel
        >>> module = torch.nn.Linear(2, 1)
        >>> training = trainingModel(module)
        >>> is_wrapped(module), is_wrapped(module.weight)
        (True, True)
    """
    return hasattr(type(item), _PLAIN)


def register_wrapper_class(wrapper: type[Any]) -> None:
    """Let instances of a new wrapper class be copied, pickled and unwrapped."""
    setattr(wrapper, _PLAIN, wrapper.__bases__[0])
    wrapper.__reduce_ex__ = _reduced  # type: ignore[assignment]


def unwrap(item: Any) -> Any:
    """Give `item` its plain class, if it has a wrapper class, and return it."""
    if is_wrapped(item):
        item.__class__ = getattr(type(item), _PLAIN)
    return item


def unwrap_model(model: torch.nn.Module) -> None:
    """Give a module and its weights plain classes, and remember the wrapper classes.

    Values that are newer on a device are fetched.
    """
    for item in [*_weights(model), model]:
        if is_wrapped(item):
            wrapper = item.__class__  # read as an attribute: that fetches the values
            unwrap(item)
            _remember(item, wrapper)


def rewrap_model(model: torch.nn.Module) -> None:
    """Give a module and its weights the wrapper classes that are remembered."""
    for item in [*_weights(model), model]:
        rewrap(item)


def rewrap(item: Any) -> Any:
    """Give `item` the wrapper class that is remembered, if any, and return it."""
    entry = _remembered.get(id(item))
    if entry is not None:
        item.__class__ = entry[1]
    return item


@contextlib.contextmanager
def unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Show a module and its weights in plain classes for a while.

    Parameters come back as plain `Parameter` unless a wrapper class is remembered for
    them: subclasses of the user's own are lost, as in PopTorch.
    """
    parameters = list(model.parameters())
    unwrap_model(model)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.__class__ = torch.nn.Parameter
        rewrap_model(model)


@contextlib.contextmanager
def seen_plain(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let weights be read and written for a while without fetching their values."""
    wrappers = [(weight, type(weight)) for weight in weights if is_wrapped(weight)]
    for weight, _ in wrappers:
        unwrap(weight)
    try:
        yield
    finally:
        for weight, wrapper in wrappers:
            weight.__class__ = wrapper


def _weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(model.buffers(), model.parameters())


def _remember(item: Any, wrapper: type[Any]) -> None:
    key = id(item)
    reference = weakref.ref(item, lambda _: _remembered.pop(key, None))
    _remembered[key] = (reference, wrapper)


def _reduced(item: Any, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Reduce a wrapped object, for `copy` and `pickle`, to a plain one and `rewrap`.

    The registry knows the plain one, so a copy is wrapped again. It doesn't know an
    unpickled object, which stays plain.
    """
    wrapper = item.__class__
    unwrap(item)
    try:
        twin = copy.copy(item)
    finally:
        item.__class__ = wrapper
    _remember(twin, wrapper)
    return rewrap, (twin,)
