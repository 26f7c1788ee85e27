# SPDX-License-Identifier: Apache-2.0
"""The first `fit` of a script, at which a command may stop it."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Mapping

Look = Callable[[Any, Mapping[str, Any]], None]
"""Looks at an `IPUModel` and at the arguments of its fit, by name."""


class FirstFit(BaseException):
    """A `fit` that was called and does nothing: whoever awaits it catches this.

    It is no `Exception`, so a script that catches errors of `fit` lets it through.

    Args:
        model: The `IPUModel`.
        arguments: Arguments of `fit` by name.
    """

    def __init__(self, model: Any, arguments: Mapping[str, Any]) -> None:
        super().__init__("A command has stopped the script at its first fit.")
        self.model = model
        self.arguments = arguments


def _see_nothing(model: Any, arguments: Mapping[str, Any]) -> None:
    """Leave the model to whoever catches the `FirstFit`."""


_look: Look | None = None


@contextlib.contextmanager
def awaited(look: Look = _see_nothing) -> Iterator[None]:
    """Have the next `fit` of this process stop its caller.

    Args:
        look: Is called before the caller is stopped, with the model and the arguments:
            files and folders that the caller has for a while are still there. If it
            raises, its error is the cause of the `FirstFit`.

    Example:
        >>> with awaited(lambda model, arguments: print(model, arguments)):
        ...     try:
        ...         arrived("a model", {"batch_size": 8})
        ...     except FirstFit as stop:
        ...         print(stop.arguments)
        a model {'batch_size': 8}
        {'batch_size': 8}
    """
    global _look
    before, _look = _look, look
    try:
        yield
    finally:
        _look = before


def arrived(model: Any, arguments: Mapping[str, Any]) -> None:
    """Say that a `fit` begins.

    Args:
        model: The `IPUModel`.
        arguments: Arguments of `fit` by name; the model may be among them.

    Raises:
        FirstFit: Somebody awaits it.
    """
    if _look is None:
        return
    others = {name: value for name, value in arguments.items() if value is not model}
    try:
        _look(model, others)
    except Exception as error:
        raise FirstFit(model, others) from error
    raise FirstFit(model, others)
