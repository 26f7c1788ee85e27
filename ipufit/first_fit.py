# SPDX-License-Identifier: Apache-2.0
"""The first `fit` of a script, at which a command may stop it."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Mapping


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


_is_awaited = False


@contextlib.contextmanager
def awaited() -> Iterator[None]:
    """Have the next `fit` of this process stop its caller.

    Example:
        >>> with awaited():
        ...     try:
        ...         arrived("a model", {"batch_size": 8})
        ...     except FirstFit as stop:
        ...         print(stop.model, stop.arguments)
        a model {'batch_size': 8}
    """
    global _is_awaited
    before, _is_awaited = _is_awaited, True
    try:
        yield
    finally:
        _is_awaited = before


def arrived(model: Any, arguments: Mapping[str, Any]) -> None:
    """Say that a `fit` begins.

    Args:
        model: The `IPUModel`.
        arguments: Arguments of `fit` by name; the model may be among them.

    Raises:
        FirstFit: Somebody awaits it.
    """
    if _is_awaited:
        others = {
            name: value for name, value in arguments.items() if value is not model
        }
        raise FirstFit(model, others)
