# SPDX-License-Identifier: Apache-2.0
"""Probabilities above which a 1 is predicted."""

from __future__ import annotations

import math

from ipufit.errors import ConfigError


def checked_threshold(threshold: float) -> float:
    """A probability between 0 and 1.

    Raises:
        ConfigError: It isn't.

    Example:
        >>> checked_threshold(0.5)
        0.5
    """
    is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if not is_number or not 0 < threshold < 1:
        raise ConfigError(
            f"threshold={threshold!r}: use a probability between 0 and 1."
        )
    return float(threshold)


def score_at(threshold: float, from_logits: bool) -> float:
    """The score of a probability: itself, or its logit.

    Example:
        >>> score_at(0.5, from_logits=True)
        0.0
    """
    return math.log(threshold / (1 - threshold)) if from_logits else threshold
