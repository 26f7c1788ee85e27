# SPDX-License-Identifier: Apache-2.0
"""Checks of the numbers that people give."""

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
    """Refuse what is no finite number in a range.

    Args:
        where: Whose value it is, for the message.
        name: The value's name.
        value: The value.
        least: It may be this or more.
        above: It must be more than this.
        below: It must be less than this.
        most: It may be this or less.

    Raises:
        ConfigError: It is not.

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
    """Refuse what is no whole number of at least so much.

    Args:
        where: Whose value it is, for the message.
        name: The value's name.
        value: The value.
        least: The smallest one allowed.

    Raises:
        ConfigError: It is not.

    Example:
        >>> check_whole("Schedule('step')", "cycles", 1.5, least=1)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: Schedule('step') has cycles=1.5: use a whole ...
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"{where} has {name}={value!r}: use a whole number of at least {least}."
        )
