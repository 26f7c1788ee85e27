# SPDX-License-Identifier: Apache-2.0
"""Listeners who want to know what a call does: upload, forward, backward, and so on.

Within forward and backward passes they hear which module's operations run.

A call without listeners looks once whether there are any, and pays nothing else.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Protocol, TypeVar

from ipufit.emulator._device.replacing import replaced
from ipufit.emulator._device.runner import Call, Runner, Training
from ipufit.emulator._device.segments import Function, Marks

_UPDATES = ("step", "step_in_no_grad")

_Result = TypeVar("_Result")


class Listener(Protocol):
    """Whoever hears of the parts of calls.

    Attributes:
        is_on: Whether the next call shall be heard.
    """

    @property
    def is_on(self) -> bool: ...

    def begin(self, name: str, phase: str) -> Any:
        """Hear that a part begins; the result is given to `end`.

        Within a part the segments of modules begin and end in the same way. Their name
        is their scope, such as `module/layer1`, and `""` outside of all modules.
        """

    def end(self, span: Any) -> None:
        """Hear that a part has ended."""


_listeners: list[Listener] = []
_calls: list[_Parts] = []


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
        ...     is_on = True
        ...     def begin(self, name, phase):
        ...         print(repr(name), phase)
        ...     def end(self, span):
        ...         pass
        >>> training = trainingModel(Network(1, 1))
        >>> training.compile(torch.ones(2, 1))
        >>> with heard_by(Printer()):
        ...     _ = training(torch.ones(2, 1))
        'upload' upload
        'forward' forward
        'mark modules' profile
        '' forward
        'backward' backward
        '' backward
        'forward' forward
        'update' update
        'forward' forward
        'download' download
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        if not _listeners:
            _marks.forget()


def is_heard() -> bool:
    """Whether anybody listens."""
    return bool(_listeners) and any(listener.is_on for listener in _listeners)


def heard_as(name: str, function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Make a function that listeners hear of as a part by itself, if it fails too.

    Args:
        name: Name and phase of the part.
        function: Does the work of the part.
    """

    def call(*args: Any) -> _Result:
        parts = _Parts()
        parts.turn_to(name, name)
        try:
            return function(*args)
        finally:
            parts.end()

    return call


@contextlib.contextmanager
def parts_heard(
    runner: Runner, call: Call, training: Training | None = None
) -> Iterator[None]:
    """Have listeners hear of the parts of the call that is made in this context.

    A call begins with the first part of its runner, and goes back to it after each
    backward pass and each update.

    Args:
        runner: Runs the call.
        call: The call.
        training: Optimiser and reduction of the call alone; None for inference.
    """
    parts = _Parts()
    with contextlib.ExitStack() as stack:
        stack.callback(parts.end)
        parts.turn_to(*runner.first_part)
        stack.enter_context(_now(parts))
        stack.enter_context(runner.marked(call, _marked))
        if training is not None:
            optimizer, first = training.optimizer, runner.first_part
            backward = parts.around("backward", training.backward, first)
            updates = {
                name: parts.around("update", getattr(optimizer, name), first)
                for name in _UPDATES
            }
            stack.enter_context(replaced(training, backward=backward))
            stack.enter_context(replaced(optimizer, **updates))
        yield


@contextlib.contextmanager
def _now(parts: _Parts) -> Iterator[None]:
    """Let the parts of a call hear of segments, while the context is open."""
    _calls.append(parts)
    try:
        yield
    finally:
        _calls.remove(parts)


def _marked(function: Function) -> Function:
    """The marked copy of a program; what it takes to make it isn't the program's."""
    if not _marks.has(function):
        for parts in _calls[-1:]:
            parts.turn_inside("mark modules", "profile")
    copy = _marks.marked(function)
    _end_segment()
    return copy


def _begin_segment(scope: str) -> None:
    for parts in _calls[-1:]:
        parts.turn_inside(scope)


def _end_segment() -> None:
    for parts in _calls[-1:]:
        parts.turn_inside(None)


_marks = Marks(_begin_segment, _end_segment)


class _Parts:
    """The parts of a call, each of which ends where the next one begins.

    Segments of modules lie within them.
    """

    def __init__(self) -> None:
        self._listeners = [one for one in _listeners if one.is_on]
        self._under_way: list[tuple[Listener, Any]] = []
        self._inside: list[tuple[Listener, Any]] = []
        self._scope: str | None = None
        self._phase = ""
        self._is_inside = False

    def turn_to(self, name: str, phase: str) -> None:
        """Begin a part."""
        self.end()
        self._phase = phase
        self._under_way = [(one, one.begin(name, phase)) for one in self._listeners]

    def turn_inside(self, scope: str | None, phase: str | None = None) -> None:
        """Begin a segment within the part under way, or end the last one."""
        if scope == self._scope:
            return
        _end(self._inside)
        self._scope, self._inside = scope, []
        if scope is not None:
            phase = phase or self._phase
            self._inside = [(one, one.begin(scope, phase)) for one in self._listeners]

    def end(self) -> None:
        """End the part under way."""
        self.turn_inside(None)
        _end(self._under_way)
        self._under_way = []

    def around(
        self, name: str, method: Callable[..., Any], first: tuple[str, str]
    ) -> Callable[..., Any]:
        """Make a method that is a part of its own; after it the first part goes on."""

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


def _end(heard: list[tuple[Listener, Any]]) -> None:
    for listener, span in heard:
        listener.end(span)
