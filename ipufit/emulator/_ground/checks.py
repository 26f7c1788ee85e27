# SPDX-License-Identifier: Apache-2.0
"""Argument checks that fail the way PopTorch's do: with `AssertionError`."""

from __future__ import annotations


def require(condition: object, message: str) -> None:
    """Raise `AssertionError` unless `condition` is true.

    PopTorch validates most arguments with bare assertions, so scripts see
    `AssertionError`. An explicit raise keeps the check under `python -O`.

    Args:
        condition: What has to hold.
        message: What went wrong and what to do about it.

    Raises:
        AssertionError: If `condition` is false.

    Example:
        >>> require(1 > 0, "never shown")
    """
    if not condition:
        raise AssertionError(message)
