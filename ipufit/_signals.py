# SPDX-License-Identifier: Apache-2.0
"""Delay signals until a step that must not be interrupted has ended.

Python calls the handlers of signals in the main thread, between any two of its
instructions. The handler of Ctrl-C raises a KeyboardInterrupt there, and handlers of
others may raise, too.
"""

from __future__ import annotations

import contextlib
import functools
import sys

# The functions of `signal` make enums of all that they take and return, in 20 times as
# long. A training call of a small model takes as long as ten of those.
from _signal import getsignal  # type: ignore[import-not-found,unused-ignore]
from _signal import signal as set_handler
from signal import default_int_handler, raise_signal, valid_signals
from threading import get_ident, main_thread
from types import FrameType
from typing import Any, Callable, TypeVar, cast

_NUMBERS = [*map(int, valid_signals())]
_MAIN_THREAD = main_thread().ident

F = TypeVar("F", bound=Callable[..., Any])


class Uninterrupted:
    """Delays signals to the end of a context, or of a decorated function.

    At the end the handlers of the signals are called, as if the signals came then. A
    second signal of a kind doesn't wait. Contexts may be nested: signals wait for the
    end of the outermost context. In other threads than the main thread the context does
    nothing.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._numbers = _NUMBERS
        self._handlers: dict[int, Any] = {}
        self._waiting: set[int] = set()

    def __call__(self, function: F) -> F:
        """Decorate a function, so that signals wait for its end."""

        @functools.wraps(function)
        def delayed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:  # they wait for the end of the caller
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return cast("F", delayed)

    def remember_signals(self) -> None:
        """Delay only the signals that have a handler now, until `forget_signals`.

        Asking for the handlers of all signals takes as long as a small training call.
        """
        self._numbers = [n for n in _NUMBERS if callable(getsignal(n))]

    def forget_signals(self) -> None:
        """Delay all signals with a handler again."""
        self._numbers = _NUMBERS

    def __enter__(self) -> None:
        if get_ident() != _MAIN_THREAD:
            return
        if self._depth:
            self._depth += 1
            return
        try:
            self._depth = 1  # from now on signals are delayed whose handlers are set
            for number in self._numbers:
                handler = getsignal(number)
                if callable(handler) and handler is not _receive:
                    self._handlers[number] = handler
                    set_handler(number, _receive)
        except BaseException:  # of a signal whose handler wasn't replaced yet
            self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        if get_ident() != _MAIN_THREAD:
            return
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._restore()
            if self._waiting:
                with contextlib.ExitStack() as stack:  # all, even if a handler raises
                    while self._waiting:
                        stack.callback(_handle, self._waiting.pop())

    def _restore(self) -> None:
        """Restore the handlers, unless other code has set handlers meanwhile."""
        for number, handler in self._handlers.items():
            if getsignal(number) is _receive:
                set_handler(number, handler)
        self._handlers.clear()

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Record a signal for later; call its handler at once at the second signal."""
        if self._depth and number not in self._waiting:
            self._waiting.add(number)
            return
        self._waiting.discard(number)
        handler = self._handlers.get(number, default_int_handler)
        if not self._depth:  # it came while handlers were restored
            self._restore()
        handler(number, frame)


def _handle(number: int) -> None:
    """Call the handler of a signal without telling event loops again."""
    handler = getsignal(number)
    if callable(handler):
        handler(number, sys._getframe())
    else:
        raise_signal(number)


uninterrupted = Uninterrupted()
"""The context; there is only this one, as a process has one handler of each signal."""

_receive = uninterrupted.receive
