# SPDX-License-Identifier: Apache-2.0
"""Wrapper classes of weights, which copy themselves from the device when read.

While a training model is compiled, the newest weights are on the device. PopTorch gives
the module, its parameters and its buffers wrapper classes that copy the weights to the
host when they are read.

Compiling and `destroy()` remove these classes. Each object's wrapper class is
remembered, and every compilation restores it, even if the executor has been destroyed
since (PopTorch, `python/_impl.py`).
"""

from __future__ import annotations

import collections
import contextlib
import copy
import weakref
from typing import Any, Callable, Iterable, Iterator, MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .core.recording import is_tracing as isDispatchTracing
from .core.refusals import refuse_lazy
from .errors import createPoptorchError

_PLAIN = "_poptorch_plain_class"

_remembered: MutableMapping[Any, type[Any]] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call,unused-ignore]
"""Living object, by its identity -> its wrapper class."""


def is_wrapped(item: object) -> bool:
    """Return whether a module, a parameter or a buffer has a wrapper class.

    Example:
        >>> from ipufit.emulator import trainingModel
        >>> module = torch.nn.Linear(2, 1)
        >>> training = trainingModel(module)
        >>> is_wrapped(module), is_wrapped(module.weight)
        (True, True)
    """
    return hasattr(type(item), _PLAIN)


def unwrap(item: Any) -> Any:
    """Restore the plain class of `item`, and return it."""
    if is_wrapped(item):
        item.__class__ = getattr(type(item), _PLAIN)
    return item


def unwrapModelIfNecessary(model: torch.nn.Module) -> None:
    """Restore the plain classes of a module and its weights.

    The wrapper classes are remembered. Weights that are newer on a device are fetched.
    """
    for item in [*model.buffers(), *model.parameters(), model]:
        if is_wrapped(item):
            wrapper = item.__class__  # read as an attribute: that fetches the values
            _remembered[unwrap(item)] = wrapper


def rewrapModelIfNecessary(model: torch.nn.Module) -> None:
    """Restore the remembered wrapper classes of a module and its weights."""
    for item in [*model.buffers(), *model.parameters(), model]:
        rewrap(item)


def rewrap(item: Any) -> Any:
    """Restore the remembered wrapper class of `item`, if any, and return it."""
    wrapper = _remembered.get(item)
    if wrapper is not None:
        item.__class__ = wrapper
    return item


@contextlib.contextmanager
def unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Restore the plain classes of a module and its weights inside a context.

    Afterwards a parameter without a remembered wrapper class is a plain `Parameter`: a
    subclass of the user's own is lost, as in PopTorch.
    """
    parameters = list(model.parameters())
    unwrapModelIfNecessary(model)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.__class__ = torch.nn.Parameter
        rewrapModelIfNecessary(model)


@contextlib.contextmanager
def seen_plain(items: Iterable[Any]) -> Iterator[None]:
    """Let weights be read and written inside a context without fetching them."""
    wrappers = [(item, type(item)) for item in items if is_wrapped(item)]
    for item, _ in wrappers:
        unwrap(item)
    try:
        yield
    finally:
        for item, wrapper in wrappers:
            item.__class__ = wrapper


def _reduced(item: Any, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Reduce a wrapped object to a plain copy, for `copy` and `pickle`.

    A copied object is wrapped again, because its plain copy is remembered. An unpickled
    object isn't, and stays plain.
    """
    wrapper = item.__class__  # read as an attribute: that fetches the values
    with seen_plain([item]):
        twin = copy.copy(item)
    _remembered[twin] = wrapper
    return rewrap, (twin,)


def wrap_module(module: torch.nn.Module, executor: Any) -> None:
    """Give a module and its weights the wrapper classes of a training executor.

    Args:
        module: The user's module; its class and its weights' classes change.
        executor: The executor with the newest weights; kept by a weak reference.

    Raises:
        Error: A weight has no shape; or a buffer is of a subclass of `torch.Tensor`.
            As in PopTorch, parameters and the buffers before that one keep wrapper
            classes then.
    """
    refuse_lazy(module)
    reference = weakref.ref(executor)
    parameter_class = _weight_class(torch.nn.Parameter, "PoptorchParameter", reference)
    for parameter in module.parameters():
        parameter.__class__ = parameter_class  # type: ignore[assignment,unused-ignore]
    buffer_class = _weight_class(Tensor, "PoptorchBuffer", reference)
    for buffer in module.buffers():
        if buffer.__class__ is not Tensor:  # of another executor: this fetches
            raise createPoptorchError(
                "All buffers must be an instance of torch.Tensor (Got "
                f"{type(buffer)}). A buffer keeps the class of a training model that "
                "was destroyed if an inference model is compiled afterwards."
            )
        buffer.__class__ = buffer_class
    module_class = _module_class(type(module), reference)
    module.__class__ = module_class
    for wrapper in (module_class, parameter_class, buffer_class):
        # Its instances can be unwrapped, copied and pickled.
        setattr(wrapper, _PLAIN, wrapper.__bases__[0])
        wrapper.__reduce_ex__ = _reduced  # type: ignore[method-assign]


def _fetch(reference: weakref.ReferenceType[Any]) -> bool:
    executor = reference()
    return executor is not None and bool(executor.copyWeightsToHostIfNeeded())


def _weight_class(
    base: type[Tensor], name: str, reference: weakref.ReferenceType[Any]
) -> type[Tensor]:
    """Return a subclass of `base` that fetches weights before an attribute is read.

    As torch does for all subclasses, results computed from a buffer have its class.
    """

    class PoptorchWeight(base):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            _fetch(reference)
            return object.__getattribute__(self, name)

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            # That it exists makes torch's functions read an attribute first.
            return super().__torch_function__(func, types, args, kwargs or {})

    PoptorchWeight.__name__ = PoptorchWeight.__qualname__ = name
    return PoptorchWeight


def _module_class(
    original: type[torch.nn.Module],
    reference: weakref.ReferenceType[Any],
) -> type[torch.nn.Module]:
    """Return a subclass of the module's class that fetches weights when read."""

    class PoptorchModel(original):  # type: ignore[misc, valid-type]
        def copyWeightsToHostIfNeeded(self) -> bool:
            return _fetch(reference)

        def destroy(self) -> None:
            executor = reference()
            if executor is not None:
                executor.destroy()

        def __getattribute__(self, name: str) -> Any:
            if name == "_host_weights_version":
                executor = reference()
                return None if executor is None else executor._host_weights_version
            if name in ("_parameters", "_buffers", "forward"):
                _fetch(reference)
            return object.__getattribute__(self, name)

        def __getattr__(self, name: str) -> Any:
            value = super().__getattr__(name)
            if isinstance(value, torch.nn.Parameter):
                _fetch(reference)
            return value

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            """Return a new dictionary of plain tensors in the same memory."""
            state = super().state_dict(*args, **kwargs)
            # By identity: tied weights stay tied.
            twins = {id(value): unwrap(copy.copy(value)) for value in state.values()}
            return collections.OrderedDict(
                (key, twins[id(value)]) for key, value in state.items()
            )

    PoptorchModel.__name__ = PoptorchModel.__qualname__ = f"Poptorch{original.__name__}"
    return PoptorchModel


__all__ = ["isDispatchTracing", "rewrapModelIfNecessary", "unwrapModelIfNecessary"]
