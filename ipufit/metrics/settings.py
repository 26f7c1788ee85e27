# SPDX-License-Identifier: Apache-2.0
"""Checks of settings that several metrics have."""

from __future__ import annotations

import math
from typing import Any

from ipufit.errors import ConfigError


def is_whole(value: Any, minimum: int) -> bool:
    """Return whether `value` is an int of at least `minimum`, and not a bool.

    Example:
        >>> is_whole(2, minimum=2), is_whole(True, minimum=0), is_whole(2.0, minimum=0)
        (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_between(value: Any, low: float, high: float) -> bool:
    """Return whether `value` is a number between `low` and `high`, and not a bool.

    Example:
        >>> is_between(0.5, 0, 1), is_between(1, 0, 1), is_between("0.5", 0, 1)
        (True, False, False)
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and low < value < high


def score_above(threshold: float, from_logits: bool) -> float:
    """Return the score above which a 1 is predicted: the threshold or its logit.

    Args:
        threshold: A probability.
        from_logits: Whether scores are logits; else they are probabilities.

    Raises:
        ConfigError: The threshold isn't between 0 and 1.

    Example:
        >>> score_above(0.5, from_logits=True)
        0.0
    """
    if not is_between(threshold, 0, 1):
        raise ConfigError(
            f"threshold={threshold!r}: use a probability between 0 and 1."
        )
    return math.log(threshold / (1 - threshold)) if from_logits else float(threshold)
