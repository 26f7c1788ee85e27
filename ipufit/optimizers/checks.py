# SPDX-License-Identifier: Apache-2.0
"""Checks of users' numbers."""

from __future__ import annotations

import math
import operator
from typing import Any

from ipufit.errors import ConfigError


def check_number(
    where: str,
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> None:
    """Refuse a value that is no finite number in a range.

    Args:
        where: The holder of the value, for the message.
        name: The value's name, for the message.
        value: Any object.
        least: Smallest value allowed.
        above: Bound that the value must exceed.
        below: Bound that the value must stay below.
        most: Largest value allowed.

    Raises:
        ConfigError: The value is no such number.

    Example:
        >>> check_number("Optimizer('sgd')", "momentum", 2, least=0, below=1)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: Optimizer('sgd') has momentum=2: use a number ...
    """
    bounds = {
        "at least": (operator.ge, least),
        "above": (operator.gt, above),
        "below": (operator.lt, below),
        "at most": (operator.le, most),
    }
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if (
        is_number
        and math.isfinite(value)
        and all(
            bound is None or holds(value, bound) for holds, bound in bounds.values()
        )
    ):
        return
    text = " and ".join(
        f"{words} {bound:g}"
        for words, (_, bound) in bounds.items()
        if bound is not None
    )
    raise ConfigError(f"{where} has {name}={value!r}: use a number {text}.")


def check_whole(where: str, name: str, value: Any, *, least: int) -> None:
    """Refuse a value that is no whole number of at least `least`.

    Args:
        where: The holder of the value, for the message.
        name: The value's name, for the message.
        value: Any object.
        least: Smallest value allowed.

    Raises:
        ConfigError: The value is no such number.

    Example:
        >>> check_whole("Schedule('step')", "cycles", 1.5, least=1)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: Schedule('step') has cycles=1.5: use a whole ...
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"{where} has {name}={value!r}: use a whole number of at least {least}."
        )
