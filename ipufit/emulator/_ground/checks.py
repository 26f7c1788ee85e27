# SPDX-License-Identifier: Apache-2.0
"""Argument checks that fail the way PopTorch's do: with `AssertionError`."""

from __future__ import annotations


def require(condition: object, message: str) -> None:
    """Raise `AssertionError` unless `condition` is true.

    PopTorch validates most arguments with bare assertions, so scripts see
    `AssertionError`. An explicit raise keeps the check under `python -O`.

    Args:
        condition: Anything with a truth value.
        message: The problem, and how to solve it.

    Raises:
        AssertionError: If `condition` is false.

    Example:
        >>> require(1 > 0, "never shown")
    """
    if not condition:
        raise AssertionError(message)


def require_type(name: str, value: object, expected: type) -> None:
    """Raise `AssertionError` unless an argument is an instance of a type.

    Args:
        name: Name of the argument, for the message.
        value: Value of the argument.
        expected: Type that the argument must have; a subclass will do.

    Raises:
        AssertionError: If it isn't an instance.

    Example:
        >>> require_type("ipu_id", "1", int)
        Traceback (most recent call last):
        AssertionError: `ipu_id` must be of type int, not '1'.
    """
    require(
        isinstance(value, expected),
        f"`{name}` must be of type {expected.__name__}, not {value!r}.",
    )
