# SPDX-License-Identifier: Apache-2.0
"""The numbers that divide a number."""

from __future__ import annotations

import math


def divisors(number: int) -> list[int]:
    """All numbers that divide a number, in order.

    Trial goes up to the square root: an epoch may have billions of samples.

    Args:
        number: 1 or more.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
