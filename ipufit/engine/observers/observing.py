# SPDX-License-Identifier: Apache-2.0
"""Shows every operation of code that is traced to observers."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, NamedTuple, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ipufit.errors import UnsupportedError


class Operation(NamedTuple):
    """One call of a function of torch's."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, nested ones too."""
        return list(tensors_of((self.args, self.kwargs)))


class Observer:
    """Base of what looks at operations: its hooks do nothing."""

    def before(self, operation: Operation) -> None:
        """Look at an operation that is about to run; an error refuses it."""

    def after(self, operation: Operation, result: Any) -> Any:
        """Return the result of an operation, or what the code gets instead."""
        return result

    def failed(self, operation: Operation, error: Exception) -> None:
        """Look at an operation that has raised an error."""


ObserverT = TypeVar("ObserverT", bound=Observer)


class Observing(TorchFunctionMode):
    """Shows each operation to observers, in their order.

    Args:
        *observers: Observers that look at all operations.

    Example:
        >>> import torch
        >>> class Names(Observer):
        ...     def before(self, operation):
        ...         print(operation.name)
        >>> with Observing(Names()):
        ...     _ = torch.ones(2).add(1)
        ones
        add
    """

    def __init__(self, *observers: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._observers = list(observers)
        self._refusal: UnsupportedError | None = None

    @contextlib.contextmanager
    def also(self, observer: ObserverT) -> Iterator[ObserverT]:
        """Show operations to one more observer for a while."""
        self._observers.append(observer)
        try:
            yield observer
        finally:
            self._observers.remove(observer)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, and show the operation to the observers."""
        operation = Operation(getattr(func, "__name__", ""), args, kwargs or {})
        try:
            for observer in self._observers:
                observer.before(operation)
            result = self._result(func, operation)
            for observer in self._observers:
                result = observer.after(operation, result)
        except UnsupportedError as refusal:
            self._refusal = refusal
            raise
        return result

    def _result(self, func: Callable[..., Any], operation: Operation) -> Any:
        try:
            return func(*operation.args, **operation.kwargs)
        except Exception as error:
            for observer in self._observers:
                observer.failed(operation, error)
            raise

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Raise what was refused, which Python's operators hide behind a TypeError."""
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call,unused-ignore]
        is_hidden = isinstance(error, TypeError) and error is not self._refusal
        if is_hidden and self._refusal is not None:
            raise self._refusal from None


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts.

    Example:
        >>> import torch
        >>> list(tensors_of((torch.ones(1), {"other": [torch.zeros(1)]}, 3)))
        [tensor([1.]), tensor([0.])]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from tensors_of(element)
