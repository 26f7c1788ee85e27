# SPDX-License-Identifier: Apache-2.0
"""Listeners who want to know when a call runs forward, backward, and updates weights.

A call without listeners looks once whether there are any, and pays nothing else.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, Callable, Iterator, Mapping, Protocol

from ipufit.emulator._device.runner import Runner, Training

_Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

_UPDATES = ("step", "step_in_no_grad")


class Listener(Protocol):
    """Whoever hears of the parts of calls."""

    def begin(self, name: str, phase: str) -> Any:
        """Hear that a part begins; the result is given to `end`."""

    def end(self, span: Any) -> None:
        """Hear that a part has ended."""


_listeners: list[Listener] = []


@contextlib.contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Have a listener hear of the calls of all programs, while the context is open.

    Example:
        >>> import torch
        >>> from ipufit.emulator import trainingModel
        >>> class Network(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return torch.nn.functional.mse_loss(super().forward(x), x)
        >>> class Printer:
        ...     def begin(self, name, phase):
        ...         print(name)
        ...     def end(self, span):
        ...         pass
        >>> training = trainingModel(Network(1, 1))
        >>> training.compile(torch.ones(2, 1))
        >>> with heard_by(Printer()):
        ...     _ = training(torch.ones(2, 1))
        forward
        backward
        forward
        update
        forward
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def is_heard() -> bool:
    """Whether anybody listens."""
    return bool(_listeners)


@contextlib.contextmanager
def parts_heard(runner: Runner, training: Training | None = None) -> Iterator[None]:
    """Have listeners hear of the parts of the call that is made in this context.

    A call begins with the first part of its runner, and goes back to it after each
    backward pass and each update.

    Args:
        runner: Runs the call.
        training: Optimiser and reduction of the call alone; None for inference.
    """
    parts = _Parts()
    with contextlib.ExitStack() as stack:
        stack.callback(parts.end)
        parts.turn_to(*runner.first_part)
        if training is not None:
            turning = partial(parts.around, first=runner.first_part)
            stack.enter_context(_hiding(training, {"backward": turning("backward")}))
            updates = {name: turning("update") for name in _UPDATES}
            stack.enter_context(_hiding(training.optimizer, updates))
        yield


class _Parts:
    """The parts of a call, each of which ends where the next one begins."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Listener, Any]] = []
        self._is_inside = False

    def turn_to(self, name: str, phase: str) -> None:
        """Begin a part."""
        self.end()
        self._under_way = [(one, one.begin(name, phase)) for one in _listeners]

    def end(self) -> None:
        """End the part under way."""
        for listener, span in self._under_way:
            listener.end(span)
        self._under_way = []

    def around(self, name: str, first: tuple[str, str]) -> _Wrap:
        """Make a wrapper of methods that are a part of their own."""

        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if self._is_inside:  # a method of the part calls another
                    return method(*args, **kwargs)
                self._is_inside = True
                self.turn_to(name, name)
                try:
                    return method(*args, **kwargs)
                finally:
                    self._is_inside = False
                    self.turn_to(*first)

            return call

        return wrap


@contextlib.contextmanager
def _hiding(owner: Any, wraps: Mapping[str, _Wrap]) -> Iterator[None]:
    """Hide methods of one object by wrapped ones, while the context is open."""
    own = vars(owner)
    for name, wrap in wraps.items():
        own[name] = wrap(getattr(owner, name))
    try:
        yield
    finally:
        for name in wraps:
            del own[name]
